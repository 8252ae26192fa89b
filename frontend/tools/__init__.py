"""Tool calls: which calls a request allows, and how they are parsed from the model's output. Independent of HTTP."""
