"""The core's side of the workers: a group of processes that executes plans."""
