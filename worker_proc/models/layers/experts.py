"""The mlp blocks of mixtures of experts, and their tensors in checkpoints."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.experts import Activation, ExpertAdapters, PackedExperts, experts
from octavo.kernels.multiply import multiply
from octavo.kernels.routing import RoutingRule, route
from octavo.kernels.sigmoid_and_mul import sigmoid_and_mul
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import Values
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.adapters import AdapterStack, LayerAdapters
from octavo.worker_proc.models.layers.linear import Linear, adapters_of
from octavo.worker_proc.models.linear_weight import LinearWeight, QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.tensor_names import Split
from octavo.worker_proc.weights.mxfp4 import Mxfp4Matrix, Mxfp4Stack
from octavo.worker_proc.weights.quantized.matrix import StoredStack


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer.

    Raises:
        ConfigError: the configuration does not have it, or has two different numbers.
    """
    keys = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key) is not None]
    counts = {required(config, key, int) for key in keys}
    if len(counts) > 1:
        raise ConfigError(f"config.json: {' and '.join(keys)} differ: {sorted(counts)}")
    return counts.pop() if counts else required(config, "num_experts", int)


def routing_rule(num_experts: int, top_k: int, **settings: Any) -> RoutingRule:
    """Return the routing rule of a configuration; see `RoutingRule` for its settings.

    Raises:
        ConfigError: its numbers contradict each other.
    """
    try:
        return RoutingRule(num_experts, top_k, **settings)
    except ShapeError as error:
        raise ConfigError(f"config.json: {error}") from error


def grouped_sigmoid_rule(
    config: Mapping[str, Any], *, scale: float = 1.0, num_groups: int = 1, num_kept_groups: int = 1
) -> RoutingRule:
    """Return DeepSeek-V3's rule, which others use too: sigmoids, groups, and a bias that affects only the choice.

    The arguments are the defaults of settings for which a configuration has no key.

    Raises:
        ConfigError: the configuration has another rule, or its numbers contradict each other.
    """
    reject_unless(config, "scoring_func", ["sigmoid"])
    reject_unless(config, "topk_method", ["noaux_tc"])
    return routing_rule(
        num_experts(config),
        required(config, "num_experts_per_tok", int),
        score="sigmoid",
        is_normalized=optional(config, "norm_topk_prob", True),
        scale=optional(config, "routed_scaling_factor", scale),
        num_groups=optional(config, "n_group", num_groups),
        num_kept_groups=optional(config, "topk_group", num_kept_groups),
        group_score="top2_sum",
    )


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a block's parts, after the block's name."""

    router: str = "gate"
    experts: str = "experts"
    gate: str | None = "gate_proj"
    """`None` if the activation has no gates. The stacked tensor then holds ups alone."""
    up: str = "up_proj"
    down: str = "down_proj"
    stacked_gate_up: str = "experts.gate_up_proj"
    """One tensor with all experts, gates first: (experts, 2 * inner width, width). The form of transformers 5."""
    stacked_down: str = "experts.down_proj"
    """One tensor with all experts: (experts, width, inner width)."""
    is_turned: bool = False
    """Whether stacked matrices are transposed."""
    is_alternating: bool = False
    """Whether gates and ups alternate in stacks (GPT-OSS)."""
    is_stacked: bool = False
    """Whether checkpoints hold only stacks."""


class Experts:
    """Routes every token to some experts, each a gated mlp, and sums their outputs.

    Args:
        parameters: parameters of the model.
        name: name of the block in the checkpoint.
        rule: how experts are chosen.
        width: width of the residual stream.
        inner_width: width of each expert's activation.
        names: names of the parts.
        activation: activation function of each expert.
        has_router_bias: bias of the router's logits.
        choice_bias: name of a bias of the scores that affects only the choice of experts; `None` if there is none.
        has_bias: whether gates, ups and downs have biases; the bias of the downs is one tensor, `<stacked_down>_bias`.
        latent_width: width of the experts' inputs and outputs; `fc1_latent_proj` projects the residual stream to it,
            and `fc2_latent_proj` back. `None` if they read and write the residual stream.
        has_latent_bias: whether these two have biases.
        input_rule: routing rule of one expert, whose weight multiplies the inputs of the experts (Llama 4); `None` if
            experts read `x` unscaled.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        rule: RoutingRule,
        width: int,
        inner_width: int,
        *,
        names: ExpertNames = ExpertNames(),
        activation: Activation = "silu_and_mul",
        has_router_bias: bool = False,
        choice_bias: str | None = None,
        has_bias: bool = False,
        latent_width: int | None = None,
        has_latent_bias: bool = False,
        input_rule: RoutingRule | None = None,
    ) -> None:
        self._rule, self._input_rule = rule, input_rule
        self._activation: Activation = activation
        router = f"{name}.{names.router}"
        parts = {router: rule.num_experts}
        weight = parameters.linear(router, parts, width, bias=has_router_bias, is_quantizable=False)
        self._router = Linear(weight, adapters_of(parameters, weight))
        self._choice_bias_E = (
            parameters.new(f"{name}.{choice_bias}", rule.num_experts, dtype=torch.float32) if choice_bias else None
        )
        sharding, self._group, self._engines = parameters.sharding, parameters.group, parameters.placement.engines
        self._own = sharding.own_experts(rule.num_experts)
        own = self._own if sharding.divides_experts else None
        if own is not None:
            inner_width *= sharding.size  # a model is built with its rank's sizes

        def weights(part: str, inputs: int, outputs: int, *, bias: bool) -> list[LinearWeight]:
            layers = [f"{name}.{names.experts}.{expert}.{part}" for expert in range(rule.num_experts)]
            weights = [
                parameters.linear(
                    layer, {layer: outputs}, inputs, bias=bias, is_own=None if own is None else expert in own
                )
                for expert, layer in enumerate(layers)
            ]
            for weight in weights:
                weight.is_grouped = True
            return weights

        self._latents: tuple[Linear, Linear] | None = None
        if latent_width is not None:
            self._latents = _latent_projections(parameters, name, width, latent_width, has_bias=has_latent_bias)
            width = latent_width
        gates = weights(names.gate, width, inner_width, bias=has_bias) if names.gate else []
        ups = weights(names.up, width, inner_width, bias=has_bias)
        downs = weights(names.down, inner_width, width, bias=False)
        self._gates, self._ups, self._downs = (
            [weights[expert] for expert in self._own if weights] for weights in (gates, ups, downs)
        )
        self._adapters = self._places_of_adapters(parameters, gates, ups, downs)
        self._down_bias_ED = (
            parameters.new(f"{name}.{names.stacked_down}_bias", rule.num_experts, width) if has_bias else None
        )
        self._packed: PackedExperts | None = None
        _accept_stacked(parameters, name, names, rule.num_experts, has_bias=has_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.MlpBlock`."""
        logits_TE = self._router(x_TD)
        routing = route(logits_TE, self._rule, self._choice_bias_E)
        if self._input_rule is not None:
            x_TD = multiply(x_TD, route(logits_TE, self._input_rule).weight_TK)
        exchange = None if self._group is None or self._engines is not None else self._exchange
        into, back = self._latents or (None, None)
        x_TD = x_TD if into is None else into(x_TD)
        output_TD = experts(x_TD, routing, self._packed_experts(), exchange, self._engines, self._expert_adapters())
        return output_TD if back is None else back(output_TD)

    def _places_of_adapters(
        self,
        parameters: Parameters,
        gates: Sequence[LinearWeight],
        ups: Sequence[LinearWeight],
        downs: Sequence[LinearWeight],
    ) -> tuple[LayerAdapters, LayerAdapters] | None:
        """Return the adapters of gates and ups, and those of downs; `None` if tokens of other engines arrive here."""
        if self._engines is not None:
            return None
        rows = zip(gates, ups, strict=True) if gates else zip(ups, strict=True)
        gates_and_ups = [weight for row in rows for weight in row]
        return self._adaptable(parameters, gates_and_ups), self._adaptable(parameters, downs)

    def _adaptable(self, parameters: Parameters, weights: Sequence[LinearWeight]) -> LayerAdapters:
        """Register that adapters can change some weights of all experts, expert by expert."""
        parts = {part: width for weight in weights for part, width in weight.parts.items()}
        shards = {part: parameters.shard_of(f"{part}.weight") for part in parts}
        return parameters.adapts(
            LayerAdapters(
                weights[0].num_inputs,
                parts,
                shards,
                is_here=parameters.stage.holds(weights[0].name, is_output=True),
                num_experts=self._rule.num_experts,
                own_experts=self._own,
            )
        )

    def _expert_adapters(self) -> ExpertAdapters | None:
        if self._adapters is None:
            return None
        gates_and_ups, downs = self._adapters
        if gates_and_ups.slots is None or downs.slots is None or gates_and_ups.rows is None:
            return None
        return ExpertAdapters(gates_and_ups.slots, downs.slots, gates_and_ups.rows)

    def _exchange(self, output_TP: Tensor) -> Tensor:
        assert self._group is not None, "a part of the experts on one rank among several"
        return self._group.all_reduce(output_TP, None, output_TP.dtype)

    def _packed_experts(self) -> PackedExperts:
        # The packed weights may be replaced by those of a mapped file at start-up.
        if self._packed is None or self._packed.downs[-1] is not self._downs[-1].packed:
            self._packed = PackedExperts(
                self._rule.num_experts,
                gates=[weight.packed for weight in self._gates],
                ups=[weight.packed for weight in self._ups],
                downs=[weight.packed for weight in self._downs],
                activation=self._activation,
                down_bias_ED=self._down_bias_ED,
                first_own=self._own.start,
            )
        return self._packed


def _latent_projections(
    parameters: Parameters, name: str, width: int, latent_width: int, *, has_bias: bool
) -> tuple[Linear, Linear]:
    """Return the layers that project the residual stream to the experts' inputs, and their outputs back."""
    return (
        Linear.new(parameters, f"{name}.fc1_latent_proj", width, latent_width, bias=has_bias),
        Linear.new(parameters, f"{name}.fc2_latent_proj", latent_width, width, bias=has_bias),
    )


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An mlp that every token passes through, in addition to its routed experts.

    Args:
        routed: the routed experts, whose output is added.
        shared: the shared mlp.
        gate: computes one number per row, whose sigmoid scales the row's output; `None` if outputs are not scaled.
    """

    routed: Experts
    shared: Callable[[Tensor], Tensor]
    gate: Linear | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.MlpBlock`."""
        shared_TD = self.shared(x_TD)
        if self.gate is not None:
            shared_TD = sigmoid_and_mul(self.gate(x_TD), shared_TD)
        return shared_TD + self.routed(x_TD)


def _accept_stacked(parameters: Parameters, name: str, names: ExpertNames, num_experts: int, *, has_bias: bool) -> None:
    """Accept tensors with all experts of a block instead of one tensor per expert."""
    prefix = f"{name}.{names.experts}"
    stacked = StackedExperts(prefix, names, num_experts)

    def parts(*layers: str | None, kind: str = "weight") -> list[str]:
        return [f"{prefix}.{expert}.{layer}.{kind}" for expert in range(num_experts) for layer in layers if layer]

    def accept(stack: Sequence[str], split: Split, parts: Iterable[str]) -> None:
        parameters.names.add_split([f"{name}.{tensor}" for tensor in stack], split, parts, is_usual=names.is_stacked)

    parameters.stacks |= {
        f"{name}.{names.stacked_gate_up}": AdapterStack(stacked.gates_and_ups, names.is_turned),
        f"{name}.{names.stacked_down}": AdapterStack(stacked.downs, names.is_turned),
    }
    gates_and_ups, downs = parts(names.gate, names.up), parts(names.down)
    gate_up, down = names.stacked_gate_up, names.stacked_down
    gate_and_up = [part for part in (names.gate, names.up) if part]
    accept([gate_up], partial(stacked.take, stacked.gates_and_ups, gate_and_up), gates_and_ups)
    accept([down], partial(stacked.take, stacked.downs, [names.down]), downs)
    if has_bias:
        accept([f"{gate_up}_bias"], stacked.gates_and_ups, parts(names.gate, names.up, kind="bias"))
    gate_up_split = partial(stacked.packed_gates_and_ups, Mxfp4Stack(num_experts))
    down_split = partial(stacked.packed_downs, Mxfp4Stack(num_experts))
    accept([f"{gate_up}_blocks", f"{gate_up}_scales"], gate_up_split, gates_and_ups)
    accept([f"{down}_blocks", f"{down}_scales"], down_split, downs)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Splits checkpoint tensors that hold all experts of a layer."""

    prefix: str
    """Name prefix of the single experts' layers."""
    names: ExpertNames
    num_experts: int

    def take(
        self,
        split: Callable[[str, Values], Iterator[tuple[str, Tensor]]],
        parts: Sequence[str],
        name: str,
        values: Values,
    ) -> Iterator[tuple[str, Values]]:
        """Yield the parts that `split` makes of a tensor, or the quantized matrices of these parts.

        Raises:
            ConfigError: the tensor has another shape, or quantized matrices another order.
        """
        if not isinstance(values, StoredStack):
            yield from split(name, values)
            return
        if values.is_turned != self.names.is_turned or self.names.is_alternating:
            raise ConfigError(
                f"{name!r} is a stack of quantized matrices in another order than octavo reads for this model",
                hint="use a checkpoint whose experts have tensors of their own (experts.0.gate_proj.weight, ...)",
            )
        if values.num_experts != self.num_experts:
            raise self._other_shape(name, (values.num_experts, *values.expert))
        for expert, matrices in enumerate(values.split(len(parts))):
            for part, matrix in zip(parts, matrices, strict=True):
                yield f"{self.prefix}.{expert}.{part}.weight", matrix

    def gates_and_ups(self, name: str, values: Values) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, or biases, of gates and ups.

        Raises:
            ConfigError: the tensor has another shape.
        """
        kind = "bias" if name.endswith("_bias") else "weight"
        for expert, rows in enumerate(self._split(name, values)):
            if self.names.gate is None:
                yield f"{self.prefix}.{expert}.{self.names.up}.{kind}", rows
                continue
            if rows.shape[0] % 2:
                raise ConfigError(f"{name!r} holds {rows.shape[0]} gates and ups of each expert, an odd number")
            gate, up = (rows[0::2], rows[1::2]) if self.names.is_alternating else rows.chunk(2)
            yield f"{self.prefix}.{expert}.{self.names.gate}.{kind}", gate
            yield f"{self.prefix}.{expert}.{self.names.up}.{kind}", up

    def downs(self, name: str, values: Values) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of downs.

        Raises:
            ConfigError: the tensor has another shape.
        """
        for expert, values_DI in enumerate(self._split(name, values)):
            yield f"{self.prefix}.{expert}.{self.names.down}.weight", values_DI

    def packed_gates_and_ups(
        self, stack: Mxfp4Stack, name: str, values: Values
    ) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Yield gates and ups from stacks with alternating output rows, once both tensors of the stack are there."""
        for expert, matrix in enumerate(stack.take(name, values)):
            for part, first in ((self.names.gate, 0), (self.names.up, 1)):
                rows = Mxfp4Matrix(name, matrix.blocks_OGB[first::2], matrix.scales_OG[first::2])
                yield f"{self.prefix}.{expert}.{part}.weight", rows

    def packed_downs(self, stack: Mxfp4Stack, name: str, values: Values) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Yield downs once both tensors of the stack are there."""
        for expert, matrix in enumerate(stack.take(name, values)):
            yield f"{self.prefix}.{expert}.{self.names.down}.weight", matrix

    def _split(self, name: str, values: Values) -> Sequence[Tensor]:
        if not isinstance(values, Tensor) or values.ndim < 2 or len(values) != self.num_experts:
            raise self._other_shape(name, tuple(values.shape))
        return [rows.t() if self.names.is_turned and rows.ndim == 2 else rows for rows in values.unbind(0)]

    def _other_shape(self, name: str, shape: tuple[int, ...]) -> ConfigError:
        return ConfigError(
            f"{name!r} has shape {shape} in the checkpoint; its config.json asks for {self.num_experts} experts"
        )
