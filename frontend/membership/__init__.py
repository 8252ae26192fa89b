"""Which engines a server has: they are added, drained, removed and replaced, and all its HTTP processes learn of it."""
