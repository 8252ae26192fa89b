"""A session with OpenVINO GenAI through its continuous batching pipeline; runs in OpenVINO's own Python.

Options: `model`, a directory with the converted model, `cache_gb` for keys and values, and `properties` of the device.
"""

import os
from typing import Any

import numpy as np
import openvino
import openvino_genai
from drive_loop import Generate, run


def load(options: dict[str, Any]) -> tuple[Generate, int]:
    """Load and compile the model."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options["cache_gb"]
    scheduler.max_num_seqs = options["max_num_seqs"]
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"], scheduler, "CPU", properties=options["properties"]
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [
            openvino_genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for n in max_tokens
        ]
        results = pipeline.generate(inputs, configs)
        return [len(result.m_generation_ids[0]) for result in results]

    return generate, os.getpid()


if __name__ == "__main__":
    run(load)
