"""The persistent batch: rows that live for a request, and the tensors of one step made from them."""
