"""Steps operation by operation through torch: the reference, and the runner that `--cpu-kernels torch` selects."""
