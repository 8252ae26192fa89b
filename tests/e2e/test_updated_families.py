"""Weights of every kind of model change in a whole engine: before, during and after it has the bits of fresh ones."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from gguf_converter import convert
from safetensors.torch import load_file
from tiny_fallback import FALLBACKS
from tiny_families import FAMILIES
from tiny_models import make_tiny
from waiting import until
from workloads import logprob_bits

from octavo import AsyncClient, SamplingParams
from octavo.frontend.outputs import CompletionOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import OutputKind

NUM_TOKENS = 240
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 400,
    "max_num_seqs": 6,
    "block_size": 16,
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "kv_cache_memory_bytes": 32 << 20,
}
PARAMS = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, output_kind=OutputKind.FINAL_ONLY
)
COMMON = [(7 * place) % 90 + 3 for place in range(64)]
PROMPTS = [COMMON[:5], [*COMMON, 11, 12], [*COMMON, 13, 14, 15]]
"""Two of them share cached blocks, and checkpoints of states."""
LONG = pytest.mark.long
CELLS = [
    ("nemotron-h-moe", {}),
    ("DeepseekV2ForCausalLM", {}),
    *(
        pytest.param(name, settings, marks=LONG)
        for name, settings in [
            ("mamba2-tied", {}),
            ("granite-hybrid", {}),
            ("qwen3-next", {"pipeline_parallel_size": 2}),
            ("falcon-h1", {"tensor_parallel_size": 2}),
            ("lfm2-moe", {}),
            ("bloom", {}),
            ("gemma2", {"pipeline_parallel_size": 2}),
            ("ernie4.5-moe", {}),
            ("roberta", {}),
            ("DeepseekV3ForCausalLM", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
            ("GptOssForCausalLM", {}),
            ("Qwen3MoeForCausalLM", {"data_parallel_size": 2, "enable_expert_parallel": True}),
            ("LlamaForCausalLM", {"quantization": "int8"}),
        ]
    ),
]


def tiny(name: str, folder: Path, seed: int) -> Path:
    if name in FAMILIES or name in FALLBACKS:
        arch, class_name, settings = (FALLBACKS | FAMILIES)[name]
        return make_tiny(arch, folder, seed=seed, class_name=class_name, **settings)
    return make_tiny(name, folder, seed=seed)


async def last(client: AsyncClient, prompt: list[int], num_tokens: int = NUM_TOKENS) -> CompletionOutput:
    async for output in client.generate({"prompt_token_ids": prompt}, PARAMS.clone(max_tokens=num_tokens)):
        return output.outputs[0]
    raise AssertionError("no output")


async def all_of(client: AsyncClient) -> list[CompletionOutput]:
    return await asyncio.gather(*(last(client, prompt) for prompt in PROMPTS))


def bits_of(output: CompletionOutput, start: int = 0, end: int = NUM_TOKENS) -> tuple[Any, Any]:
    return output.token_ids[start:end], logprob_bits(output.logprobs[start:end])


async def has_drawn(client: AsyncClient, goal: int) -> bool:
    return (await client.engine_stats()).generation_tokens >= goal


async def updated(path: Path, other: Path, settings: dict[str, Any]) -> list[list[CompletionOutput]]:
    """Return outputs before, during and after an update."""
    async with AsyncClient.launch(str(path), **{**SETTINGS, **settings}) as client:
        before = await all_of(client)
        goal = (await client.engine_stats()).generation_tokens + 60
        running = asyncio.create_task(all_of(client))
        await until(lambda: has_drawn(client, goal), lambda: "tokens")
        assert await client.update_weights(str(other)) == 1
        return [before, await running, await all_of(client)]


async def require_fresh(other: Path, settings: dict[str, Any], outputs: list[list[CompletionOutput]]) -> None:
    """Compare with an engine that was started with the new weights."""
    before, during, after = outputs
    async with AsyncClient.launch(str(other), **{**SETTINGS, **settings}) as fresh:
        for got, want in zip(after, await all_of(fresh), strict=True):
            assert bits_of(got) == bits_of(want)
        for prompt, old, met in zip(PROMPTS, before, during, strict=True):
            cut = next((start for start, _, version in met.weight_versions if version == 1), NUM_TOKENS)
            assert bits_of(met, 0, cut) == bits_of(old, 0, cut)
            if cut < NUM_TOKENS:
                want = await last(fresh, [*prompt, *met.token_ids[:cut]], NUM_TOKENS - cut)
                assert bits_of(met, cut) == bits_of(want)
    assert any(len(met.weight_versions) == 2 for met in during), "the update met a request"
    assert [bits_of(old) for old in before] != [bits_of(new) for new in after]


@pytest.mark.parametrize(("name", "settings"), CELLS)
def test_an_update_leaves_the_bits_of_a_fresh_engine(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path, other = (tiny(name, tmp_path / str(seed), seed) for seed in (0, 1))
    outputs = asyncio.run(updated(path, other, settings))
    asyncio.run(require_fresh(other, settings, outputs))


@LONG
def test_gguf_files_take_each_others_place_and_that_of_nothing_else(tmp_path: Path) -> None:
    models = [make_tiny("LlamaForCausalLM", tmp_path / str(seed), seed=seed, hidden_size=96) for seed in (0, 1)]
    path, other = (convert(model, model.with_suffix(".gguf"), kind=GGMLQuantizationType.Q8_0) for model in models)
    asyncio.run(require_fresh(other, {}, asyncio.run(updated(path, other, {}))))

    async def refused() -> None:
        async with AsyncClient.launch(str(path), **SETTINGS) as client:
            before = await all_of(client)
            for weights in (str(models[1]), load_file(models[1] / "model.safetensors")):
                with pytest.raises(InvalidRequestError, match=r"safetensors, and the engine was started with gguf"):
                    await client.update_weights(weights)
            assert [bits_of(one) for one in before] == [bits_of(one) for one in await all_of(client)]

    asyncio.run(refused())
