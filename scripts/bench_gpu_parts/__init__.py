"""The parts of scripts/bench_gpu: sections, measurements and reports."""
