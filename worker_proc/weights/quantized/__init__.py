"""Readers of quantized safetensors checkpoints, one file per format: they combine a layer's tensors into one matrix."""
