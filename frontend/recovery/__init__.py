"""Recovery from crashes of the core: restarts the core, and resubmits its requests to the new one."""
