"""Receipts: the inputs and digests of a response, so that it can be computed again and compared bit for bit."""
