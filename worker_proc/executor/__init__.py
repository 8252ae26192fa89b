"""From plans to results: one executor for every device, over a runner that computes."""
