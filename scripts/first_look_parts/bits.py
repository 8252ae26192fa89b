"""Whether a position has the same bits in every step: as a row of a prompt, of a chunk, and as a decode in a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bench_gpu_parts.machine import Sampling
from bench_gpu_parts.steps import StepRunner
from bench_gpu_parts.timing import DEVICE

from first_look_parts.figures import cell_result, figure
from octavo.kernels.paged_attention import AttentionShape, gpu
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled

BLOCK_SIZE = 16
CHUNKS = (1, 7, 64, 129)
"""Lengths of the first chunk of a chunked prompt; the rest is one chunk."""

Logprobs = tuple[tuple[int, ...], tuple[float, ...]]


@torch.inference_mode()
def attention_bits(
    length: int,
    num_decodes: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    has_sinks: bool = False,
    key_value_dim: int | None = None,
) -> dict[str, Any]:
    """Compare attention over a complete prompt with chunks of it and with decodes, all in one other step."""
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window, key_value_dim=key_value_dim
    )
    sinks = torch.randn(num_heads, device=DEVICE) if has_sinks else None
    blocks = -(-length // BLOCK_SIZE)
    caches = [torch.randn(blocks, BLOCK_SIZE, num_kv_heads, head_dim, device=DEVICE).bfloat16() for _ in range(2)]
    if key_value_dim is not None:
        caches[1] = caches[0][..., :key_value_dim]
    queries = torch.randn(length, num_heads, head_dim, device=DEVICE).bfloat16()
    block_ids = torch.randperm(blocks, device=DEVICE).int()
    whole = gpu.plan([0, length], [length], block_ids[None], BLOCK_SIZE, shape)(queries, *caches, sinks_N=sinks)
    ends = sorted(
        {*range(1, length, max(1, length // num_decodes)), 255, 256, 257, 512, length} & set(range(1, length + 1))
    )
    parts = [(1, end) for end in ends] + [(min(rows, length), length) for rows in (2, 17, 64, 65, 300)]
    starts = np.cumsum([0, *(rows for rows, _ in parts)]).tolist()
    rows_of_parts = torch.cat([queries[end - rows : end] for rows, end in parts])
    tables = block_ids.expand(len(parts), -1).contiguous()
    beside = gpu.plan(starts, [end for _, end in parts], tables, BLOCK_SIZE, shape)(
        rows_of_parts, *caches, sinks_N=sinks
    )
    differing = [
        (rows, end)
        for (rows, end), start in zip(parts, starts, strict=False)
        if not torch.equal(beside[start : start + rows], whole[end - rows : end])
    ]
    name = "attention with sinks" if has_sinks else "attention"
    if key_value_dim is not None:
        name = f"latent attention, {num_heads} heads"
    return _result(name, len(parts), [f"{rows} rows up to {end}" for rows, end in differing])


@torch.inference_mode()
def model_bits(runner: StepRunner, prompt_len: int, num_outputs: int, company: int) -> dict[str, Any]:
    """Compare the logprobs of a request alone, of the same request in a batch, and of its tokens as a prompt.

    All of it runs with graphs, with chunks of the prompt in steps with decodes, and then kernel by kernel.
    """
    requests = _Requests(runner, prompt_len + num_outputs)
    prompt = np.random.default_rng(1).integers(0, runner.config.model.vocab_size, prompt_len).tolist()
    outputs, alone = requests.generate(prompt, num_outputs, company=0)
    outputs_beside, beside = requests.generate(prompt, num_outputs, company=company)
    in_chunks = requests.compute_prompt(prompt + outputs[:-1], company)
    with runner.without_graphs():
        outputs_eager, eager = requests.generate(prompt, num_outputs, company=company)
        chunks_eager = requests.compute_prompt(prompt + outputs[:-1], company)
    differing = [] if outputs == outputs_beside == outputs_eager else ["the tokens in company or without graphs"]
    compared = {
        "in company": beside,
        "as a prompt in chunks": in_chunks,
        "in company without graphs": eager,
        "as a prompt in chunks without graphs": chunks_eager,
    }
    for name, others in compared.items():
        places = [place for place, (one, other) in enumerate(zip(alone, others, strict=False), 1) if one != other]
        if places:
            differing.append(f"{len(places)} positions {name}, the first {places[0]}")
    return _result("model", sum(map(len, compared.values())), differing)


class _Requests:
    """Runs a request in slot 0, and other requests that decode with it."""

    def __init__(self, runner: StepRunner, max_len: int) -> None:
        self._runner = runner
        self._blocks_each = -(-(max_len + 1) // runner.config.block_size)

    def generate(self, prompt: list[int], num_outputs: int, company: int) -> tuple[list[int], list[Logprobs]]:
        """Return the outputs, and the logprobs of all tokens but the first."""
        sampling = {"prompt_logprobs": 1, "logprobs": 1, "temperature": 1.0}
        with_company = self._begin(prompt, sampling, company)
        length = len(prompt)
        self._runner.run(scheduled=[Scheduled(0, 0, length, 1), *with_company(0)])
        for step in range(1, num_outputs):
            self._runner.run(scheduled=[Scheduled(0, length + step - 1, 1, 1), *with_company(step)])
        self._runner.synchronize()
        results = self._runner.results[-num_outputs:]
        logprobs = [entry for slot, entries in results[0].prompt_logprobs for entry in entries if slot == 0]
        logprobs += [entry for result in results if (entry := result.logprobs[0]) is not None]
        outputs = [int(result.token_ids[0]) for result in results]
        self._end(company)
        return outputs, [_plain(entry) for entry in logprobs]

    def compute_prompt(self, token_ids: list[int], company: int) -> list[Logprobs]:
        """Return the logprobs of a prompt that is computed in chunks without a sample after it."""
        with_company = self._begin(token_ids, {"prompt_logprobs": 1}, company)
        start, step = 0, 0
        ends = [end for end in np.cumsum(CHUNKS).tolist() if end < len(token_ids)]
        for end in [*ends, len(token_ids)]:
            self._runner.run(scheduled=[Scheduled(0, start, end - start, 0), *with_company(step)])
            start, step = end, step + 1
        self._runner.synchronize()
        results = self._runner.results[-step:]
        self._end(company)
        return [_plain(entry) for result in results for _, entries in result.prompt_logprobs for entry in entries]

    def _begin(self, token_ids: list[int], sampling: Sampling, company: int) -> Any:
        """Admit the request and its company; return a function of the step that gives the company's work."""
        others = np.random.default_rng(2).integers(0, self._runner.config.model.vocab_size, (company, 8)).tolist()
        self._runner.run(
            admitted=[
                self._admitted(0, token_ids, sampling),
                *(self._admitted(slot, prompt, {"temperature": 1.0}) for slot, prompt in enumerate(others, 1)),
            ]
        )
        slots = range(1, company + 1)
        return lambda step: [
            Scheduled(slot, 0, 8, 1) if step == 0 else Scheduled(slot, 7 + step, 1, 1) for slot in slots
        ]

    def _end(self, company: int) -> None:
        self._runner.run(released=list(range(company + 1)))
        self._runner.synchronize()
        self._runner.results.clear()

    def _admitted(self, slot: int, token_ids: list[int], sampling: Sampling) -> Admitted:
        blocks = range(slot * self._blocks_each, (slot + 1) * self._blocks_each)
        return Admitted(
            slot=slot,
            request_id=f"{slot}",
            token_ids=pack_ids(token_ids),
            num_prompt_tokens=len(token_ids),
            block_ids=[list(blocks)],
            params=SamplingSpec(**{"max_tokens": 1000, "seed": 5 + slot, **sampling}),
        )


def _plain(entry: TokenLogprobs) -> Logprobs:
    return tuple(entry.token_ids), tuple(entry.logprobs)


def _result(name: str, num_compared: int, differing: Sequence[str]) -> dict[str, Any]:
    title = f"{name}: positions or chunks whose bits differ, of {num_compared}"
    lines = [f"BITS DIFFER, {name}: {'; '.join(differing[:8])}"] if differing else []
    return cell_result([figure(f"bits-{name}", title, "", len(differing), digits=0)], list(differing), lines)
