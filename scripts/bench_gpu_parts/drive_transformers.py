"""A session with the continuous batching of transformers. Options: `model`, `temperature`, `writes` (only weights).

If the directory has no weights, random ones are written there, for other engines too.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from bench_cpu_parts.drive_loop import Generate, claim_output, run
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

RESULT_WAIT_S = 1.0


def write_weights(directory: Path) -> None:
    """Write random weights in bfloat16 next to the model's configuration."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def load(options: dict[str, Any]) -> tuple[Generate, int]:
    """Load the model and start its batching; it ends together with this process."""
    sampling = {"do_sample": options["temperature"] > 0}
    if sampling["do_sample"]:
        sampling["temperature"] = options["temperature"]
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    manager = model.to("cuda").eval().init_continuous_batching(GenerationConfig(eos_token_id=-1, **sampling))
    manager.start()

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        ids = [
            manager.add_request(prompt, max_new_tokens=count) for prompt, count in zip(prompts, max_tokens, strict=True)
        ]
        counts: dict[str, int] = {}
        while len(counts) < len(ids):
            result = manager.get_result(timeout=RESULT_WAIT_S)
            if result is not None and result.is_finished():
                counts[result.request_id] = len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
        return [counts[request_id] for request_id in ids]

    return generate, os.getpid()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if options.get("writes"):
        replies = claim_output()
        write_weights(Path(options["model"]))
        print("{}", file=replies)
    else:
        run(load)
