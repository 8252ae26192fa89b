"""The sum of a matrix over the ranks of a tensor-parallel group, in an order that depends only on their number."""
