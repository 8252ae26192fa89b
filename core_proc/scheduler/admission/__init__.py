"""Admission: which requests are rejected at once (`rejection.py`), and which waiting ones may start (`rules.py`)."""
