"""The parts of `scripts/vllm_tests`: the list of tests, and replacements for vLLM's own helpers."""

LEFT_OUT = "VLLM_TESTS_LEFT_OUT"
"""Environment variable with the names of tests to leave out, one per line; `--deselect` would also match prefixes."""
