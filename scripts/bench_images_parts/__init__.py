"""Parts of `scripts/bench_images.py`."""
