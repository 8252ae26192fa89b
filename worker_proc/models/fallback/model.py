"""A `transformers` model for architectures that we have no family for: its own code, with our products and attention.

Requests are packed: for the model's code their rows are one sequence, with the positions of each request. Only
attention separates them. Torch's row operations give a row the same bits in any place if they run on one thread and the
number of rows is a multiple of their vector length, 16 numbers. So rows are padded to a multiple of `ROW_MULTIPLE`, and
only products and attention use several threads.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from octavo.kernels.linear import Packer
from octavo.kernels.linear.native import NativeProduct
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.paged_attention.layout import MAX_HEAD_DIM
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.fallback.configuration import depends_on_length, empty_model, refusal
from octavo.worker_proc.models.fallback.conversion import Conversion
from octavo.worker_proc.models.fallback.hooks import SERVE, use_attention
from octavo.worker_proc.models.fallback.install import install
from octavo.worker_proc.models.fallback.probe import ProbedAttention, Structure, probe, run_base, run_head
from octavo.worker_proc.models.linear_weight import LinearWeight, QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.streamed_packing import StreamedPacking
from octavo.worker_proc.parallel.placement import Placement

ROW_MULTIPLE = 16


class Step:
    """The rows that a model computes at the moment, and how."""

    def __init__(self) -> None:
        self.attention: Attention | None = None
        self.num_rows = 0
        """Number of token rows; later rows are padding."""
        self.num_padded_rows = 0
        self.policy: ThreadPolicy | None = None
        """Thread policy of native products; `None` means torch's."""
        self.num_threads = 1
        """Number of threads of torch's products."""

    @contextmanager
    def of(self, num_rows: int, attention: Attention | None, *, min_padding: int = 0) -> Iterator[int]:
        """Begin a pass over some rows. Yield their number, padding included."""
        self.attention, self.num_rows = attention, num_rows
        self.num_padded_rows = -(-(num_rows + min_padding) // ROW_MULTIPLE) * ROW_MULTIPLE
        self.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield self.num_padded_rows
        finally:
            torch.set_num_threads(self.num_threads)
            self.attention = None


class PackedProduct:
    """The product of a model parameter, in place of torch's."""

    def __init__(self, weight: LinearWeight, step: Step, *, is_of_step: bool) -> None:
        self._weight = weight
        self._step = step
        self._is_of_step = is_of_step
        """Whether the inputs are the rows of the step, padding included; False for rows of an expert."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` for rows of a tensor of any shape; padding rows are zeros."""
        x_TI = x.reshape(-1, x.shape[-1])
        has_padding = self._is_of_step and len(x_TI) == self._step.num_padded_rows
        num_rows = self._step.num_rows if has_padding else len(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), self._weight.num_outputs)
        out_TO[num_rows:] = 0
        if num_rows:
            self._multiply(x_TI[:num_rows], out_TO[:num_rows])
        return out_TO.view(*x.shape[:-1], self._weight.num_outputs)

    def _multiply(self, x_TI: Tensor, out_TO: Tensor) -> None:
        product = self._weight.packed.product
        if isinstance(product, NativeProduct):
            assert self._step.policy is not None, "prepare() comes before forward()"
            work = len(x_TI) * self._weight.num_inputs * self._weight.num_outputs
            product.multiply(x_TI, out_TO, self._step.policy.choose(work))
            return
        torch.set_num_threads(self._step.num_threads)
        out_TO.copy_(product(x_TI.contiguous()))
        torch.set_num_threads(1)


class LayerAttention:
    """The attention of one layer over the cache. See `octavo.worker_proc.models.fallback.hooks.AttentionHook`."""

    def __init__(self, facts: ModelFacts, index: int, probed: ProbedAttention, step: Step) -> None:
        self._facts = facts
        self._name = probed.name
        self._index = index
        self._padding = probed.shape.head_dim - probed.value_dim
        self._value_dim = probed.value_dim
        self._step = step

    def __call__(
        self, module: nn.Module, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        """Store keys and values, and attend."""
        step = self._step
        assert step.attention is not None, "attention outside of a step"
        if mask is not None:
            raise refusal(self._facts, f"{self._name} makes masks of its own")
        q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1)[: step.num_rows] for x in (q_BNTH, k_BKTH, v_BKTH))
        if self._padding:
            v_TKH = functional.pad(v_TKH, (0, self._padding))
        sinks_N = arguments.get("s_aux")
        torch.set_num_threads(step.num_threads)
        out_TNH = step.attention.run(q_TNH, k_TKH, v_TKH, self._index, sinks_N=sinks_N)
        torch.set_num_threads(1)
        padding = (0, 0, 0, 0, 0, step.num_padded_rows - step.num_rows)
        return functional.pad(out_TNH[..., : self._value_dim], padding)[None]


class TransformersModel(Model):
    """A causal model that `transformers` builds.

    Args:
        facts: facts of the model.
        model: model whose parameters are stand-ins.
        structure: how they and the attention are used.
        parameters: empty parameters of the model.
    """

    impl = "transformers"

    def __init__(self, facts: ModelFacts, model: PreTrainedModel, structure: Structure, parameters: Parameters) -> None:
        super().__init__(parameters, [attention.shape for attention in structure.attention])
        self.step = Step()
        install(
            facts,
            model,
            structure,
            parameters,
            lambda weight, is_of_step: PackedProduct(weight, self.step, is_of_step=is_of_step),
        )
        self._conversion = Conversion(model, structure)
        for index, attention in enumerate(structure.attention):
            attention.module.octavo = LayerAttention(facts, index, attention, self.step)  # type: ignore[assignment]
        use_attention(model, SERVE)
        self.module = model
        """Module as `transformers` made it."""
        self._base_name = structure.base_name
        self._architecture = facts.architecture
        self._first_position, self._max_positions = structure.first_position, structure.max_positions
        self.padding_ids = structure.padding_ids
        """Token ids that the model skips when it counts positions."""
        self._depends_on_length = depends_on_length(model.config)
        """Whether angles depend on the highest position of a step. Padding then has the highest possible one."""
        self._max_model_len = 1
        self.counts_positions = False
        """Whether the model counts positions itself, which is possible for a single request."""
        self.base = model.get_submodule(structure.base_name)
        """Module that returns the hidden states."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`."""
        num_tokens = len(token_ids_T)
        with self.step.of(num_tokens, attention, min_padding=int(self._depends_on_length)) as num_rows:
            padding = (0, num_rows - num_tokens)
            last = self._max_model_len - 1 if self._depends_on_length else 0
            positions_T = functional.pad(positions_T, padding, value=last) + self._first_position
            hidden_TD = run_base(
                self.base, functional.pad(token_ids_T, padding), None if self.counts_positions else positions_T
            )
        return hidden_TD[:num_tokens]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`."""
        with self.step.of(len(hidden_RD), None) as num_rows:
            padded_RD = functional.pad(hidden_RD, (0, 0, 0, num_rows - len(hidden_RD)))
            logits_RV = run_head(self.module, self._base_name, padded_RD)
        return logits_RV[: len(hidden_RD)]

    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor | QuantizedMatrix]],
        packer: Packer | None = None,
        *,
        keeps_quantized: bool = False,
        packing: StreamedPacking | None = None,
    ) -> None:
        """See `octavo.worker_proc.models.base.Model`."""
        super().load_weights(self._conversion(weights), packer, keeps_quantized=keeps_quantized, packing=packing)

    def reads(self, tensor: str) -> bool:
        """Return whether the model has a checkpoint tensor, or makes one of its tensors from it."""
        return self._conversion.reads(tensor)

    def prepare(self, max_model_len: int) -> None:
        """Choose the number of threads. The model computes its tables in each step.

        Raises:
            ConfigError: the model has fewer than `max_model_len` positions.
        """
        if self._max_positions is not None and max_model_len > self._max_positions:
            raise ConfigError(
                f"{self._architecture} has {self._max_positions} positions, not {max_model_len}: its table begins with "
                f"{self._first_position} rows of padding",
                hint=f"run with --max-model-len {self._max_positions}",
            )
        self._max_model_len = max_model_len
        if self.library is not None:
            self.step.policy = ThreadPolicy(self.library, torch.get_num_threads())


def build(facts: ModelFacts, placement: Placement) -> TransformersModel:
    """Make the model that `facts` describes.

    Raises:
        ConfigError: the model cannot be served, or not in this way; the message says why.
    """
    refusals = {
        "--tensor-parallel-size": placement.group is not None or placement.sharding.size > 1,
        "--enable-expert-parallel": placement.engines is not None,
        "--pipeline-parallel-size": not (placement.stage.is_first and placement.stage.is_last),
    }
    for flag, is_set in refusals.items():
        if is_set:
            raise ConfigError(
                f"{flag}: models that run through transformers are not divided",
                hint="use --data-parallel-size, or one worker",
            )
    if placement.device.type == "cuda":
        raise ConfigError("models that run through transformers need a CPU", hint="run with --device cpu")
    if facts.load_format == "gguf":
        raise ConfigError("models that run through transformers are not read from GGUF files", hint="use safetensors")
    model = empty_model(facts, placement.dtype)
    structure = probe(model, facts)
    head_dim = max(attention.shape.head_dim for attention in structure.attention)
    if head_dim > MAX_HEAD_DIM >= facts.head_dim:
        raise refusal(facts, f"its heads have {head_dim} dimensions, not the {facts.head_dim} of config.json")
    ignored = [r"rotary_emb\.inv_freq$", *(f"^{re.escape(name)}$" for name in structure.other_names)]
    parameters = Parameters(placement, prefixes=(), ignored=ignored)
    return TransformersModel(facts, model, structure, parameters)
