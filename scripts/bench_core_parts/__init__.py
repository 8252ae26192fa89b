"""Parts of `scripts/bench_core`."""
