"""Admission: which requests are rejected at once (`rejection.py`), and which waiting requests may start
(`rules.py`)."""
