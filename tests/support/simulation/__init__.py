"""An engine in one thread, on a virtual clock: scheduler and service are real, the rest is simulated. See run.py."""
