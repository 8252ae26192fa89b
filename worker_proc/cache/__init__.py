"""The tensors that hold keys and values."""
