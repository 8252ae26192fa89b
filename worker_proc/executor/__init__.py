"""Executes plans and delivers results: one executor for every device, over a runner that computes."""
