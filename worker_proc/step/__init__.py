"""One step of the worker: from a plan to its result."""
