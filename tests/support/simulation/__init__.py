"""An engine in one thread, on a virtual clock: real scheduler and service, the rest is simulated. See run.py."""
