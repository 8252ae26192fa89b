"""A session with vLLM through `vllm.LLM`, in vLLM's own Python. Options: `model`, and `settings` for the engine."""

import os
from typing import Any

from drive_loop import Generate, run


def load(options: dict[str, Any]) -> tuple[Generate, int]:
    """Start an engine; it ends together with this process."""
    # Imported here, because vLLM's child processes import this file again.
    from vllm import LLM, SamplingParams

    llm = LLM(model=options["model"], disable_log_stats=True, **options["settings"])

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for n in max_tokens]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, os.getpid()


if __name__ == "__main__":
    run(load)
