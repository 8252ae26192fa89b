"""Steps on a device that computes while the host goes on: static buffers, graphs, and two steps in flight."""
