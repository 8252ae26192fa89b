"""Batch files in OpenAI's format: the lines of requests, the results file, and the execution of a batch."""
