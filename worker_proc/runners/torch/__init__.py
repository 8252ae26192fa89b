"""Steps operation by operation through torch: the reference, and what `--cpu-kernels torch` names."""
