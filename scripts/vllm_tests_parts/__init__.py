"""The parts of `scripts/vllm_tests`: what is run, and what stands for vLLM's own helpers."""

LEFT_OUT = "VLLM_TESTS_LEFT_OUT"
"""Variable with the names of tests that pytest leaves out, one a line; `--deselect` takes beginnings of names too."""
