"""Parts of `scripts/bench_pipeline`."""
