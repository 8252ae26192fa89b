"""Batches of requests in a file, as OpenAI writes them: their lines, the file of results, and the run between."""
