"""What scripts/bench_cpu is made of: ceilings, models, engines, sessions and servers, rows, and the table."""
