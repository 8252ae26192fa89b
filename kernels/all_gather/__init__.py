"""The columns of all ranks of a tensor-parallel group, side by side."""
