"""The parts of scripts/bench_gpu: what is measured, how, and what becomes of the numbers."""
