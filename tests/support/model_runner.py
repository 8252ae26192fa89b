"""Runs tiny models step by step, without an engine: chunks and batches of requests with scattered blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE
from torch import Tensor
from transformers import PreTrainedModel

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.linear import Packer
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.config import ModelFacts
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.worker_proc.attention.native import NativeCacheAttention
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.attention.recorded import StepBounds
from octavo.worker_proc.batch.inputs import AdapterInputs, GroupInputs, StateInputs, StepInputs
from octavo.worker_proc.cache.groups import key_sizes, max_group_layers
from octavo.worker_proc.cache.states import open_states
from octavo.worker_proc.cache.storage import KVStorage
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.runners.host import Forward
from octavo.worker_proc.runners.native.programs import NativePrograms
from octavo.worker_proc.runners.torch.forward import TorchForward

BLOCK_SIZE = 16
MAX_LEN = 256
LENGTHS = [200, 37, 131]


def facts_of(path: Path) -> ModelFacts:
    return read_model_facts(engine_config({"model": str(path)}).model, Env.read())


def load(path: Path, dtype: torch.dtype, kernels: NativeLibrary | None) -> Model:
    return filled(build_model(facts_of(path), Placement(dtype)), path, kernels)


def with_config(facts: ModelFacts, config: dict[str, Any], architecture: str | None = None) -> ModelFacts:
    return replace(facts, hf_config=config, architecture=architecture or facts.architecture)


def filled(model: Model, path: Path, kernels: NativeLibrary | None) -> Model:
    return packed(model, load_file(path / "model.safetensors"), kernels)


def packed(model: Model, weights: Mapping[str, Tensor], kernels: NativeLibrary | None) -> Model:
    model.load_weights(weights.items())
    model.library = kernels
    model.pack(Packer(torch.device("cpu"), native=kernels))
    return model


@dataclass
class Runner:
    """Runs steps of up to four requests whose blocks are scattered over the cache.

    States stay where they are in some steps, and move in others. So a request continues where its last step ended.
    """

    model: Model
    dtype: torch.dtype
    max_len: int = MAX_LEN
    """Maximum length of a request in tokens."""
    adapters: list[int] = field(default_factory=lambda: [NO_ADAPTER] * 4)
    """Adapter slot of each request."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        num_groups = len(self.model.cache_groups)
        self.num_blocks = num_groups * 4 * -(-self.max_len // BLOCK_SIZE)
        self.tables = list(
            torch.randperm(self.num_blocks, generator=generator)
            .int()
            .view(num_groups, 4, self.num_blocks // 4 // max(num_groups, 1))
        )
        """Block tables, by cache group."""
        self.num_steps = 0
        self.state_slots = [0, 2, 4, 6]
        """Slot of each request's state: one of two."""
        self.forward = self._forward()

    def _forward(self) -> Forward:
        model = self.model
        states = open_states(model.state_group, 2 * len(self.state_slots))
        if model.library is not None:
            layouts = [
                CacheLayout.of(group.shape, self.dtype, BLOCK_SIZE, index)
                for index, group in enumerate(model.cache_groups)
            ]
            bounds = StepBounds(
                max_rows=self.max_len + 50, max_context=self.max_len, max_logits=self.max_len + 50, num_threads=2
            )
            if not model.is_recordable:
                cache = NativeCacheAttention(model.library, model.cache_groups, layouts, self.num_blocks, bounds)
                return TorchForward(model, cache, self.max_len)
            return NativePrograms(model.library, model, layouts, self.num_blocks, bounds, states)
        num_kv_heads, head_dim, key_value_dim = key_sizes(model.cache_groups)
        storage = KVStorage(
            num_layers=max_group_layers(model.cache_groups),
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            key_value_dim=key_value_dim,
            dtype=self.dtype,
        )
        return TorchForward(model, PagedCacheAttention(storage, model.cache_groups, states), self.max_len)

    def step(
        self,
        tokens: list[Tensor],
        parts: list[tuple[int, int, int]],
        segments: Mapping[int, int] | None = None,
    ) -> list[Tensor]:
        """Compute positions [start, end) of requests: (request, start, end) triples; the logits of each.

        `segments`: where the second text of a request begins.
        """
        counts = [end - start for _, start, end in parts]
        inputs = StepInputs(
            torch.cat([tokens[request][start:end] for request, start, end in parts]).numpy(),
            np.concatenate([self._positions(*part, segments or {}) for part in parts]),
            np.array([0, *counts]).cumsum(),
            np.array([end for _, _, end in parts]),
            np.repeat([request for request, _, _ in parts], counts),
            tuple(self._group(table, parts) for table in self.tables),
            self._states(parts) if self.model.state_group else None,
            adapters=self._adapters(parts, counts),
        )
        with torch.inference_mode():
            self.forward.run(inputs)
            return list(self.forward.logits(np.arange(sum(counts))).clone().split(counts))

    def _positions(self, request: int, start: int, end: int, segments: Mapping[int, int]) -> Any:
        positions = np.arange(start, end)
        return positions + self.model.segment_stride * (positions >= segments.get(request, end))

    def _adapters(self, parts: list[tuple[int, int, int]], counts: list[int]) -> AdapterInputs | None:
        if self.model.adapter_rows is None:
            return None
        slots_T = np.repeat([self.adapters[request] for request, _, _ in parts], counts)
        return AdapterInputs(slots_T, self.model.adapter_rows.num_slots)

    def _states(self, parts: list[tuple[int, int, int]]) -> StateInputs:
        self.num_steps += 1
        sources = [self.state_slots[request] if start > 0 else -1 for request, start, _ in parts]
        for request, _, _ in parts:
            self.state_slots[request] ^= self.num_steps % 2
        destinations = [self.state_slots[request] for request, _, _ in parts]
        return StateInputs(np.array(sources, dtype=np.int32), np.array(destinations, dtype=np.int32))

    def _group(self, table: Tensor, parts: list[tuple[int, int, int]]) -> GroupInputs:
        slots = [
            table[request].long()[torch.arange(start, end) // BLOCK_SIZE] * BLOCK_SIZE
            + torch.arange(start, end) % BLOCK_SIZE
            for request, start, end in parts
        ]
        return GroupInputs(torch.cat(slots).numpy(), table[[request for request, _, _ in parts]].numpy())

    def in_chunks(self, tokens: list[Tensor], request: int, ends: list[int]) -> Tensor:
        """Compute one request alone, in chunks."""
        pieces = [self.step(tokens, [(request, start, end)])[0] for start, end in zip([0, *ends], ends, strict=False)]
        return torch.cat(pieces)

    def greedy(self, prompt: Tensor, num_tokens: int) -> Tensor:
        """Return a prompt and the greedy tokens after it."""
        known = prompt
        last = self.step([known], [(0, 0, len(known))])[0][-1]
        for _ in range(num_tokens):
            known = torch.cat((known, last.argmax()[None]))
            last = self.step([known], [(0, len(known) - 1, len(known))])[0][-1]
        return known


def results_of_transformers(model: PreTrainedModel) -> tuple[list[Tensor], Tensor]:
    """Return what `transformers` computes: the logits of `prompts`, and the second of them with 16 greedy tokens."""
    tokens = prompts(VOCAB_SIZE)
    known = tokens[1]
    with torch.inference_mode():
        logits = [model(prompt[None]).logits[0] for prompt in tokens]
        for _ in range(16):
            known = torch.cat((known, model(known[None]).logits[0, -1].argmax()[None]))
    return logits, known


def assert_equals_transformers(runner: Runner, logits: list[Tensor], greedy: Tensor) -> None:
    """Check that probabilities and greedy tokens equal those of `results_of_transformers`."""
    tokens = prompts(VOCAB_SIZE)
    for request, theirs in enumerate(logits):
        actual = runner.in_chunks(tokens, request, [len(tokens[request])])
        torch.testing.assert_close(actual.log_softmax(1), theirs.log_softmax(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(runner.greedy(tokens[1], len(greedy) - len(tokens[1])), greedy)


def assert_chunks_and_batches_do_not_change_a_bit(runner: Runner) -> None:
    """Check that each position has the logits, bit for bit, of its request computed alone in one step."""
    tokens = prompts(VOCAB_SIZE)
    whole = [runner.in_chunks(tokens, request, [len(tokens[request])]) for request in range(3)]
    assert all(bool(logits.isfinite().all()) for logits in whole)
    for ends in ([7, 8, 9, 60, 73, 130, 200], [1, 199, 200]):
        assert torch.equal(runner.in_chunks(tokens, 0, ends), whole[0]), ends
    parts = [(0, 0, 130), (1, 0, 5), (2, 0, 130)], [(0, 130, 131), (1, 5, 37)], [(0, 131, 132), (2, 130, 131)]
    for step in parts:
        for logits, (request, start, end) in zip(runner.step(tokens, step), step, strict=True):
            assert torch.equal(logits, whole[request][start:end]), (request, start, end)


def prompts(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in LENGTHS]
