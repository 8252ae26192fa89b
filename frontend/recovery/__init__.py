"""Recovery from crashes of the core: restarting it, and resubmitting its requests to the next one."""
