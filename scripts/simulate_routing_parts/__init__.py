"""Parts of `scripts/simulate_routing.py`."""
