"""Receipts: what an answer was computed from and with which bits, so that it can be computed again and compared."""
