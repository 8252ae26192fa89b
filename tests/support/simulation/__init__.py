"""An engine in one thread, on a virtual clock: real scheduler and service, simulated everything else. See run.py."""
