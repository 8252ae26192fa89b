"""The parts of scripts/bench_cpu: ceilings, models, engines, sessions and servers, rows, and the table."""
