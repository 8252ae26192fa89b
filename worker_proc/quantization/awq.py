"""AWQ: scales up inputs with large activations before rounding, and scales down the module that produces them.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2024). The range
of each group minimizes the error weighted by the activations (`rounding.to_groups`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.quantization.calibration import Blocks
from octavo.worker_proc.quantization.rounding import to_groups

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose blocks have the modules of `_scaled_together`."""
_EXPONENTS = [step / 20 for step in range(20)]
_WHOLE_RANGE = (1.0,)
_COMPARED_ROWS = 512
"""Number of input rows of a layer. Their outputs decide between exponents."""


@dataclass(slots=True, eq=False)
class Activations:
    """Statistics of the inputs of a layer."""

    magnitude_I: Tensor
    """Sum of absolute values."""
    square_I: Tensor
    """Sum of squares."""
    rows_TI: Tensor
    """The first rows."""
    num_rows: int = 0

    @classmethod
    def none(cls, num_inputs: int) -> "Activations":
        """Return the statistics of no rows."""
        return cls(torch.zeros(num_inputs), torch.zeros(num_inputs), torch.empty(0, num_inputs))

    def add(self, rows_TI: Tensor) -> None:
        """Add the rows of a sample."""
        self.magnitude_I += rows_TI.abs().sum(0)
        self.square_I += rows_TI.square().sum(0)
        self.num_rows += len(rows_TI)
        if (missing := _COMPARED_ROWS - len(self.rows_TI)) > 0:
            self.rows_TI = torch.cat([self.rows_TI, rows_TI[:missing]])

    def divided(self, scale_I: Tensor) -> "Activations":
        """Return the statistics of inputs that were divided by a scale."""
        return Activations(
            self.magnitude_I / scale_I, self.square_I / scale_I.square(), self.rows_TI / scale_I, self.num_rows
        )


def require_known(model: nn.Module) -> None:
    """Check that the model's blocks can be scaled.

    Raises:
        ConfigError: the blocks of the model are unknown.
    """
    architecture = type(model).__name__
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"--format awq does not know the blocks of {architecture}, only those of {', '.join(ARCHITECTURES)}",
            hint="use --format gptq",
        )


def scale_block(block: nn.Module, blocks: Blocks, group_size: int) -> dict[nn.Linear, Activations]:
    """Scale the weights of a block without changing its function. Return the inputs of its linear layers."""
    together = _scaled_together(block)
    layers = [layer for _, group in together for layer in group]
    seen = {layer: Activations.none(layer.in_features) for layer in layers}
    blocks.see_inputs(layers, lambda layer, rows_TI: seen[layer].add(rows_TI))
    for source, group in together:
        activations, parameters = seen[group[0]], list(source.parameters())
        if len(parameters[0]) != group[0].in_features:  # o_proj has one input per query head, v_proj has fewer outputs
            continue
        scale_I = _best_scale([layer.weight for layer in group], activations, group_size)
        for values in parameters:
            values.div_(scale_I.view(-1, *[1] * (values.ndim - 1)))
        for layer in group:
            layer.weight.mul_(scale_I)
            seen[layer] = seen[layer].divided(scale_I)
    return seen


def _scaled_together(block: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return groups of layers that read the same inputs, each with the module that produces them, last group first.

    In this order the inputs of a module are not scaled before the module is.
    """

    def linears(*names: str) -> list[nn.Linear]:
        modules = [block.get_submodule(name) for name in names]
        return [module for module in modules if isinstance(module, nn.Linear)]

    up, down = linears("mlp.up_proj", "mlp.down_proj")
    value, output = linears("self_attn.v_proj", "self_attn.o_proj")
    return [
        (up, [down]),
        (block.get_submodule("post_attention_layernorm"), linears("mlp.gate_proj", "mlp.up_proj")),
        (value, [output]),
        (block.get_submodule("input_layernorm"), linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ]


def _best_scale(weights: list[Tensor], activations: Activations, group_size: int) -> Tensor:
    """Return the scale with which rounded weights give the smallest error of the outputs, float32."""
    weight_OI = torch.cat(weights).float()
    mean_I = (activations.magnitude_I / max(activations.num_rows, 1)).clamp(min=1e-4)
    wanted_TO = activations.rows_TI @ weight_OI.T
    best_I, least = torch.ones_like(mean_I), torch.inf
    for exponent in _EXPONENTS:
        scale_I = mean_I**exponent
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        inputs = activations.divided(scale_I)
        groups = to_groups(weight_OI * scale_I, group_size, is_symmetric=False, shrinks=_WHOLE_RANGE)
        loss = float((inputs.rows_TI @ groups.values().T - wanted_TO).square().mean())
        if loss < least:
            best_I, least = scale_I, loss
    return best_I
