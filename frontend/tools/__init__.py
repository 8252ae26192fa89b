"""Tool calls: which ones a request may get, and how they are found in what a model writes. Knows no HTTP."""
