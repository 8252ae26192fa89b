"""A session with octavo through `octavo.LLM`. Options: `model`, `settings` for the engine, and `temperature`."""

import os
from typing import Any

from drive_loop import Generate, run

from octavo import LLM, SamplingParams


def load(options: dict[str, Any]) -> tuple[Generate, int]:
    """Start an engine; it ends together with this process."""
    llm = LLM(model=options["model"], **options["settings"])

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        shared = SamplingParams(temperature=options.get("temperature", 0.0), ignore_eos=True, detokenize=False)
        params = [shared.clone(max_tokens=count) for count in max_tokens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, os.getpid()


if __name__ == "__main__":
    run(load)
