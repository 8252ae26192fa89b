"""Admission: which requests are refused at once (`refusal.py`), and which waiting ones may start (`rules.py`)."""
