"""One pass through a `transformers` model without weights, to learn how it uses its attention and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.fallback.configuration import refusal, refusing_errors
from octavo.worker_proc.models.fallback.hooks import ProbedMask
from octavo.worker_proc.models.fallback.weights import ProbedWeight

NUM_ROWS = 8
"""Number of rows of the pass."""

_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments that our attention supports."""
_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "use_cache", "layer_idx", "training", "return_dict"})
"""Arguments that have no effect, or that are checked elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbedAttention:
    """The attention of one layer."""

    name: str
    """Name of the module."""
    module: nn.Module
    shape: AttentionShape
    value_dim: int
    """Value size of a head, at most the key size."""


@dataclass(slots=True, eq=False)
class Structure:
    """The findings of the pass."""

    attention: list[ProbedAttention] = field(default_factory=list)
    """Attention modules in the order of calls."""
    weights: dict[str, ProbedWeight] = field(default_factory=dict)
    """All parameters, by the first of their names."""
    other_names: list[str] = field(default_factory=list)
    """Second names of parameters that have two."""
    base_name: str = ""
    """Name of the module that returns hidden states, from which the rest of the model computes logits."""
    first_position: int = 0
    """Position that the model gives to the first token (2 in RoBERTa, whose position table has padding rows)."""
    max_positions: int | None = None
    """Rows of that table after the first position; `None` if all positions are as in `config.json`."""
    padding_ids: frozenset[int] = frozenset()
    """Token ids that models skip when they count positions."""


class _Recorder:
    """Records every call of attention."""

    def __init__(self, facts: ModelFacts, names: dict[nn.Module, str]) -> None:
        self._facts = facts
        self._names = names
        self.calls: list[ProbedAttention] = []

    def __call__(
        self, module: nn.Module, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        name = self._names[module]
        self._check(name, module, q_BNTH, k_BKTH, v_BKTH, arguments)
        window, is_chunked = arguments.get("sliding_window"), False
        if isinstance(mask, ProbedMask):
            if not mask.is_known:
                raise refusal(self._facts, f"the mask of {name} is neither causal, nor a window, nor a chunk")
            window, is_chunked = mask.window, mask.is_chunked
        elif mask is not None:
            raise refusal(self._facts, f"{name} adds a mask or biases of its own to the scores")
        scale = arguments.get("scaling")
        shape = AttentionShape(
            q_BNTH.shape[1],
            k_BKTH.shape[1],
            q_BNTH.shape[3],
            float(scale) if scale is not None else q_BNTH.shape[3] ** -0.5,
            window,
            arguments.get("softcap"),
            is_chunked=is_chunked,
        )
        self.calls.append(ProbedAttention(name, module, shape, v_BKTH.shape[3]))
        return q_BNTH.new_zeros(1, NUM_ROWS, q_BNTH.shape[1], v_BKTH.shape[3])

    def _check(
        self, name: str, module: nn.Module, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, arguments: dict[str, Any]
    ) -> None:
        given = {key for key, value in arguments.items() if value is not None and value is not False}
        unknown = given - _KNOWN - _HARMLESS
        if unknown:
            raise refusal(self._facts, f"{name} passes {', '.join(sorted(unknown))} to its attention")
        if not (getattr(module, "is_causal", True) and arguments.get("is_causal") in (None, True)):
            raise refusal(self._facts, f"{name} is not causal")
        if any(call.module is module for call in self.calls):
            raise refusal(self._facts, f"{name} attends more than once for each token")
        lengths = {tensor.shape[2] for tensor in (q_BNTH, k_BKTH, v_BKTH)}
        if lengths != {NUM_ROWS} or k_BKTH.shape[3] != q_BNTH.shape[3] or v_BKTH.shape[3] > k_BKTH.shape[3]:
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in (q_BNTH, k_BKTH, v_BKTH))
            raise refusal(self._facts, f"queries, keys and values of {name} have the shapes {sizes}")


def probe(model: PreTrainedModel, facts: ModelFacts) -> Structure:
    """Replace the parameters by stand-ins, run the model once, and return the findings.

    Raises:
        ConfigError: the model computes something that cannot be served; the message names the module and the reason.
    """
    bases = model.base_model, model.get_decoder(), getattr(model, "model", None)
    base_name = next((name for base in bases for name, module in model.named_children() if module is base), None)
    if base_name is None:
        raise refusal(facts, "its head is not separate from its layers")
    weights, other_names = _put_probes(model)
    structure = Structure(weights=weights, other_names=other_names, base_name=base_name)
    padding = {getattr(module, "padding_idx", None) for module in model.modules()}
    structure.padding_ids = frozenset(token for token in padding if token is not None)
    token_ids_T = torch.full((NUM_ROWS,), next(token for token in count() if token not in structure.padding_ids))
    names, base = {module: name for name, module in model.named_modules()}, model.get_submodule(base_name)
    with refusing_errors(facts, "its code failed"):
        _record(model, _Recorder(facts, names))
        run_base(base, token_ids_T, None)
        own_lookups = _take_lookups(structure)
        recorder = _record(model, _Recorder(facts, names))
        hidden = run_base(base, token_ids_T, torch.arange(NUM_ROWS))
        _find_first_position(structure, own_lookups, facts)
        logits = run_head(model, base_name, hidden)
    if logits.shape != (NUM_ROWS, facts.vocab_size):
        raise refusal(facts, f"its logits have the shape {tuple(logits.shape)}, and the vocabulary {facts.vocab_size}")
    if (num_calls := len(recorder.calls)) != facts.num_layers:
        raise refusal(facts, f"{num_calls} of {facts.num_layers} layers attend through the attention interface")
    structure.attention = recorder.calls
    return structure


def _record(model: nn.Module, recorder: _Recorder) -> _Recorder:
    for module in model.modules():
        module.octavo = recorder  # type: ignore[assignment]
    return recorder


def _take_lookups(structure: Structure) -> dict[str, list[Tensor]]:
    """Return the rows that a pass looked up, by the name of the table, and drop them."""
    lookups = {name: weight.lookups for name, weight in structure.weights.items() if weight.lookups}
    for name in lookups:
        structure.weights[name].lookups = []
    return lookups


def _find_first_position(structure: Structure, own_lookups: Mapping[str, list[Tensor]], facts: ModelFacts) -> None:
    """Find the first position: compare the rows looked up for the model's own positions with those for positions from
    0.

    Raises:
        ConfigError: the positions differ by more than a constant.
    """
    lookups = _take_lookups(structure)
    for name, own in own_lookups.items():
        given = lookups.get(name, [])
        offsets = {int(offset) for mine, theirs in zip(own, given, strict=False) for offset in (mine - theirs).unique()}
        if len(own) != len(given) or len(offsets) != 1:
            raise refusal(facts, f"the rows of {name} that it reads do not follow from positions")
        offset = offsets.pop()
        if offset and structure.first_position not in (0, offset):
            raise refusal(facts, f"its tables of positions begin at {structure.first_position} and at {offset}")
        if offset:
            structure.first_position = offset
            structure.max_positions = structure.weights[name].shape[0] - offset


def run_base(base: nn.Module, token_ids_T: Tensor, positions_T: Tensor | None) -> Tensor:
    """Return hidden_TD of a batch of rows, after the final norm; without positions, those are the model's own."""
    positions_1T = None if positions_T is None else positions_T[None]
    out = base(input_ids=token_ids_T[None], position_ids=positions_1T, use_cache=False)
    hidden_TD: Tensor = out.last_hidden_state[0]
    return hidden_TD


class _KnownOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """A base model's output for a head that reads only hidden states."""

    def __getattr__(self, name: str) -> None:
        """Return `None` for other outputs, such as caches and routing."""
        return


class _KnownBase(nn.Module):
    """Replaces the base of a model whose hidden states are known."""

    def __init__(self, hidden_RD: Tensor) -> None:
        super().__init__()
        self._output = _KnownOutput(last_hidden_state=hidden_RD[None])

    def forward(self, *_: Any, **__: Any) -> _KnownOutput:
        """Return the hidden states as the base does."""
        return self._output


def run_head(model: PreTrainedModel, base_name: str, hidden_RD: Tensor) -> Tensor:
    """Return logits_RV: everything that the model computes after its base, such as output layer, factors and caps."""
    base = model._modules[base_name]
    model._modules[base_name] = _KnownBase(hidden_RD)
    try:
        out = model(input_ids=torch.zeros(1, len(hidden_RD), dtype=torch.long), use_cache=False)
    finally:
        model._modules[base_name] = base
    logits_RV: Tensor = out.logits[0]
    return logits_RV


def _put_probes(model: PreTrainedModel) -> tuple[dict[str, ProbedWeight], list[str]]:
    """Return the stand-ins, each with the name that checkpoints have for it, and all other names."""
    tied = getattr(model, "all_tied_weights_keys", {})
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for group in names.values():
        group.sort(key=tied.__contains__)  # checkpoints have those that the others are tied to
    probes = {parameter: ProbedWeight.of(parameter.shape, parameter.dtype) for parameter in names}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = probes[parameter]
    return (
        {group[0]: probes[parameter] for parameter, group in names.items()},
        [name for group in names.values() for name in group[1:]],
    )
