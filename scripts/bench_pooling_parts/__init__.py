"""The parts of bench_pooling."""
