"""How much a model loses when its weights are rounded. Rounds nothing."""
