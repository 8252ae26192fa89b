"""The sum of a matrix over the ranks of a tensor-parallel group, in an order that only their number decides."""
