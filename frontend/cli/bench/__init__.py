"""`octavo bench`: a server under load, an engine's throughput and latency, and how long it takes to start."""
