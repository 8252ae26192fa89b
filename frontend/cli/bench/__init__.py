"""`octavo bench`: benchmarks of a server under load, of an engine's throughput and latency, and of startup time."""
