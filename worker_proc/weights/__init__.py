"""Reads checkpoints, or makes dummy weights: tensors under the names and shapes of the checkpoint."""
