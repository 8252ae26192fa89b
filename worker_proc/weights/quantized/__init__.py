"""Readers of quantized safetensors checkpoints, one file per format: from a layer's tensors to one matrix."""
