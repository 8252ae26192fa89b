"""Python files of the operator that bring further parsers: octavo's own, and those written for vLLM."""
