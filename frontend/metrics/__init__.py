"""Prometheus metrics and the throughput line of the log."""
