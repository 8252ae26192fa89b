"""Parts of `scripts/bench_kv_offloading.py`."""
