"""The core's side of the workers: a group that executes plans, however its processes are run."""
