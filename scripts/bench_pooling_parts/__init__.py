"""Parts of `scripts/bench_pooling`."""
