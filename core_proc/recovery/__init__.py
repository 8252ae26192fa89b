"""Recovery from crashes of workers: the workers restart, and the requests continue."""
