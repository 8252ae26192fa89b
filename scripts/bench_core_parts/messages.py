"""Configurations and messages of the benchmark: the only file here that depends on the wire format."""

from array import array
from typing import Any

import msgspec

from octavo.protocol.config import (
    CacheGroupSpec,
    DeviceFacts,
    EngineConfig,
    ModelConfig,
    ModelFacts,
    RecoveryConfig,
    ResolvedConfig,
    resolve,
)
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult

VOCAB_SIZE = 32_000
TOKEN = 7
"""The token that the fake worker always samples."""

FIRST_TOKEN = 1000
"""First token of prompts. Python shares one object per integer up to 256, so lists of those would look small."""

_TOKENS = array("i", [FIRST_TOKEN + index % 30_000 for index in range(100_000)])

FACTS = DeviceFacts(
    rank=0,
    device_name="none",
    total_bytes=2**40,
    free_bytes=2**40,
    weights_bytes=0,
    activation_bytes=0,
    cache_groups=[CacheGroupSpec(num_layers=1, block_bytes=1)],
)


def engine_config(*, num_blocks: int, **changes: Any) -> ResolvedConfig:
    """Return the configuration of an engine without a model and without queue limits."""
    model = ModelFacts(
        model_path="/nowhere",
        tokenizer_path=None,
        load_format="dummy",
        architecture="LlamaForCausalLM",
        hf_config={},
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=2**20,
        checkpoint_dtype="float32",
        eos_token_ids=[0],
    )
    base = resolve(EngineConfig(model=ModelConfig(model="none")), model, device="cpu", num_cores=1)
    # one plan per step, because the cost of a plan is measured
    unlimited = {
        "num_scheduler_steps": 1,
        "num_blocks_override": num_blocks,
        "full_step_tokens": 0,
        "decode_interval_tokens": 0,
        "max_num_queued_reqs": 0,
        "max_num_queued_tokens": 0,
        "recovery": RecoveryConfig(execute_model_timeout=3600.0),
    }
    return msgspec.structs.replace(base, **{**unlimited, **changes})


def prompt_of(index: int, length: int, salt: int = 0) -> list[int]:
    """Return a prompt that shares neither a prefix with other indices and salts nor integer objects."""
    head = [FIRST_TOKEN + number % 30_000 for number in (index, index // 30_000, salt)]
    return [*head, *_TOKENS[: length - len(head)].tolist()]


def submission(request_id: str, prompt: list[int], max_tokens: int) -> Submit:
    """Return a request that runs until it has generated `max_tokens` tokens."""
    return Submit(request_id, pack_ids(prompt), SamplingSpec(max_tokens=max_tokens, seed=0))


def result_of(plan: StepPlan) -> StepResult:
    """Return a made-up result of a step."""
    num_sampled = sum([scheduled.num_samples for scheduled in plan.scheduled])
    return StepResult(plan.sequence, pack_ids([TOKEN] * num_sampled), [], [])
