"""Batches of requests in a file, in OpenAI's format: lines, results file, and the run."""
