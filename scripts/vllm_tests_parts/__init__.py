"""The parts of `scripts/vllm_tests`: what is run, and what stands for vLLM's own helpers."""
