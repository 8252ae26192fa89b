"""Measures how much quality a model loses by quantization. Does not quantize."""
