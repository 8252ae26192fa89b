"""From files, or from nothing, to named tensors in the checkpoint's own names and shapes."""
