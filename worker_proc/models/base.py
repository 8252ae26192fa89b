"""The interface of all models to the worker. Knows no architecture."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.given_rows import all_given_rows
from octavo.kernels.linear import Packer
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.model import ModelImpl
from octavo.protocol.errors import ConfigError
from octavo.protocol.media import Kind
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.cache.groups import StateGroup, StateShape, group_layers
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.given_rows import GivenRows
from octavo.worker_proc.models.layers.devices import check_recurrent
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.streamed_packing import StreamedPacking
from octavo.worker_proc.parallel.stages import StageExchange
from octavo.worker_proc.pooling.heads import PoolingHead


class Norm(Protocol):
    """A normalization of rows."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the normalized rows."""

    def fused_add_norm(self, x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + update`, and its normalized rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """The residual stream between two layers: all that passes from one pipeline stage to the next."""

    hidden_TD: Tensor
    update_TD: Tensor | None = None
    """Output of the last block, which the next norm adds; `None` if `hidden` already includes it."""

    def total(self) -> Tensor:
        """Return the sum of both."""
        return self.hidden_TD if self.update_TD is None else self.hidden_TD + self.update_TD

    def plus(self, update_TD: Tensor) -> "Residual":
        """Return the stream after a block's output. The next norm adds the output: a GPU does both in one pass."""
        return Residual(self.total(), update_TD)

    def normalized(self, norm: Norm) -> tuple["Residual", Tensor]:
        """Return the stream with the update added, and the normalized sum."""
        if self.update_TD is None:
            return self, norm(self.hidden_TD)
        total_TD, normalized_TD = norm.fused_add_norm(self.hidden_TD, self.update_TD)
        return Residual(total_TD), normalized_TD


Tables = tuple[Tensor, ...]
"""Values that all layers look up by position, such as rotary angles; one row per row of the step."""


class StepAngles(Protocol):
    """Rotary angles that are computed for each step, for a model with positions on several axes."""

    def put(self, axes_AT: npt.NDArray[np.int64], stream: Stream | None = None) -> None:
        """Compute the angles of the next step, given the axis positions of its rows.

        `stream`: stream of the device. The angles are written after all its work so far. `None` means on the host, at
        once.
        """


class Layer(Protocol):
    """One layer of a decoder."""

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after this layer."""


@dataclass(frozen=True, slots=True, eq=False)
class DeeperLayer:
    """A layer to whose result further rows of images are added (DeepStack)."""

    layer: Layer
    rows_XD: Tensor
    """Rows of the step to add; zeros for text tokens."""

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual = self.layer(residual, tables, attention)
        added_TD = all_given_rows(residual.hidden_TD, self.rows_XD)
        return replace(residual, hidden_TD=residual.hidden_TD + added_TD)


class CrossLayer(Protocol):
    """Cross-attention: attends to the item of a request."""

    shape: AttentionShape

    def keys_and_values(self, item_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_TKH and v_TKH of the rows of an item."""


class Weights(Protocol):
    """An object with weights."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters."""


class Model(ABC):
    """A decoder: tokens in, hidden states and logits out. Holds no state of requests.

    Callers run it under `torch.inference_mode()`.

    Args:
        parameters: parameters of all layers.
        shapes: shape of the attention of each layer; `None` for a layer without attention.
        states: state shape of each layer; `None` for a layer without a state. Empty if no layer has one.

    Raises:
        ConfigError: a model with states is divided between GPUs.
    """

    impl: ClassVar[ModelImpl] = "octavo"
    """Implementation of the model."""
    is_recordable: ClassVar[bool] = False
    """Whether its operations can be recorded as a native program, and as CUDA graphs."""

    def __init__(
        self,
        parameters: Parameters,
        shapes: Sequence[AttentionShape | None],
        states: Sequence[StateShape | None] = (),
    ) -> None:
        self._parameters = parameters
        self.dtype = parameters.dtype
        self.device = parameters.device
        self.library: NativeLibrary | None = None
        """Library that computes its steps, and for which its weights are packed; `None` means torch."""
        self.given_rows: GivenRows | None = None
        """Rows that replace token embeddings; `None` if this worker takes none."""
        self.step_angles: StepAngles | None = None
        """Receives the angles of a step's rows; `None` if angles are looked up by the rows' positions."""
        self.adapter_rows: AdapterRows | None = None
        """LoRA adapter of each row of a step, for layers outside of programs; `None` if there are no adapters."""
        self.cache_scales: Mapping[int, tuple[float, float]] = {}
        """Factors that stored keys and values are multiplied by, by layer; 1 for other layers."""
        self.segment_stride = 0
        """Offset added to positions of a prompt's second text (BERT's token types), so that they select other rows of
        the position table; 0 if the model does not distinguish the texts of a pair."""
        self.pooling_head: PoolingHead | None = None
        """Layers after pooling; `None` if the model generates tokens."""
        self.cross_layers: Sequence[CrossLayer] = ()
        """Layers that attend to the encoded media of a tower."""
        self.exchange: StageExchange | None = None
        """Link to the previous and the next pipeline stage; `None` if all layers are here."""
        self.features: Features | None = None
        """Hidden states that a draft head reads; `None` if there is no head."""
        self.head: Model | None = None
        """Draft head or draft model for speculative decoding; `None` if there is none."""
        self.towers: Mapping[Kind, Weights] = {}
        """Encoder of each kind of media; {} if the model reads tokens only, or if another stage has the towers. One
        tower may serve several kinds."""
        self.cross_cache: CrossCache | None = None
        """Keys and values of encoded media, if layers attend to them. Created before steps are recorded."""
        self.stage = parameters.stage
        """Layers of this pipeline stage."""
        self.cache_groups = group_layers(shapes, self.stage.layers)
        """Layers of this stage, grouped by shared block table."""
        self.state_group: StateGroup | None = None
        """Layers of this stage that have a state; `None` if no layer of the model has one."""
        if any(states):
            check_recurrent(parameters)
            own = {layer: state for layer, state in enumerate(states) if state and layer in self.stage.layers}
            self.state_group = StateGroup(own)

    @abstractmethod
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor | None:
        """Return hidden_TD, after the final norm; `None` if another stage computes it.

        Blocks until the previous stage, if any, is done with the step.

        Args:
            token_ids_T: int64.
            positions_T: int64.
            attention: planned for this step.
        """

    @abstractmethod
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits_RV in the model's type for rows of `forward`'s result. A model that pools returns the rows."""

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Compute the tables that requests of up to `max_model_len` tokens need."""

    def take_given_rows(self, max_rows: int, num_deeper: int = 0) -> None:
        """Allow requests to provide rows instead of token embeddings. Call before a step is recorded.

        Args:
            max_rows: most rows of a step.
            num_deeper: see `GivenRows`.

        Raises:
            ConfigError: the model does not support this.
        """
        raise ConfigError(
            "--enable-prompt-embeds: models that run through transformers take token ids only",
            hint="leave --enable-prompt-embeds out",
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters, including a head, towers and given rows."""
        given_bytes = self.given_rows.num_bytes if self.given_rows else 0
        others: list[Weights] = [*dict.fromkeys(self.towers.values()), *([self.head] if self.head else [])]
        return self._parameters.num_bytes + given_bytes + sum([model.weights_bytes for model in others])

    @property
    def parameters(self) -> Parameters:
        """All tensors and weights, to fill and pack them."""
        return self._parameters

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all parameters, to write into them."""
        return self._parameters.named()

    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor | QuantizedMatrix]],
        packer: Packer | None = None,
        *,
        keeps_quantized: bool = False,
        packing: StreamedPacking | None = None,
    ) -> None:
        """Fill the parameters from a checkpoint with Hugging Face names.

        Args:
            weights: weights by name.
            packer: packer of the model's device, to pack weights while others are read; `pack` then packs the rest.
                `None` if nothing is packed yet.
            keeps_quantized: see `pack`.
            packing: notified of each tensor that was read; replaces `packer`.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape, or a weight cannot be packed.
        """
        if packing is None and packer is not None:
            packing = StreamedPacking(self._parameters.linears, packer, keeps_quantized=keeps_quantized)
        self._parameters.load(weights, *([packing.take] if packing else []))

    def pack(self, packer: Packer, *, keeps_quantized: bool = False) -> None:
        """Pack the weights for the kernels. Call after loading, before the first step.

        Args:
            packer: packer of the model's device.
            keeps_quantized: whether weights that are quantized in the checkpoint stay so.
        """
        self._parameters.pack(packer, keeps_quantized=keeps_quantized)


class LayeredModel(Model):
    """A model that is made of our layers.

    `forward` is `begin`, the layers, and `end`. A pipeline stage begins or ends between two layers instead.
    """

    is_recordable = True
    carries_update: ClassVar[bool] = False
    """Whether the `Residual` between two layers has an `update_TD`."""
    layers: Sequence[Layer]
    """All layers; those of other stages have no weights."""
    _embedding: TokenEmbedding

    def take_given_rows(self, max_rows: int, num_deeper: int = 0) -> None:
        """See `Model.take_given_rows`. Only the first stage has embeddings."""
        if not self.stage.is_first:
            return
        if num_deeper > len(self.stage.layers):
            raise ConfigError(
                f"the first {num_deeper} layers read rows of images, and the first stage has {len(self.stage.layers)}",
                hint="use a smaller --pipeline-parallel-size",
            )
        width = self._embedding.table_VD.shape[1]
        self.given_rows = GivenRows(max_rows, width, self.dtype, self.device, num_deeper)
        deeper = map(DeeperLayer, self.layers, self.given_rows.deeper_LXD)
        self.layers = [*deeper, *self.layers[num_deeper:]]

    def with_given_rows(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Return the looked-up token embeddings, with the rows that requests provide in their place."""
        return x_TD if self.given_rows is None else self.given_rows.replace(x_TD, token_ids_T)

    @abstractmethod
    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """Return the embeddings, and the tables for the layers.

        Args:
            token_ids_T: int64.
            positions_T: int64.
        """

    def tables(self, positions_T: Tensor) -> Tables:
        """Return the tables for the layers, for a stage that does not begin with the embeddings."""
        return ()

    @abstractmethod
    def end(self, residual: Residual) -> Tensor:
        """Return hidden_TD, after the final norm, for `logits`."""

    def run_layers(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after the layers of this stage. `attention` is planned for this step."""
        for index, layer in enumerate(self.layers):
            if index in self.stage.layers:
                residual = layer(self._shown(residual, index), tables, attention)
        return self._shown(residual, len(self.layers))

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor | None:
        """See `Model.forward`."""
        if self.stage.is_first:
            residual, tables = self.begin(token_ids_T, positions_T)
        else:
            residual, tables = self._received(positions_T), self.tables(positions_T)
        residual = self.run_layers(residual, tables, attention)
        if self.stage.is_last:
            hidden_TD = self.end(residual)
            if self.features is not None:
                self.features.finish(hidden_TD)
            return hidden_TD
        self._send(residual)
        return None

    def _shown(self, residual: Residual, index: int) -> Residual:
        """Return the residual stream before a layer, after copying it for the draft head if the head reads it."""
        if self.features is None or index not in self.features.layers:
            return residual
        total_TD = residual.total()
        self.features.take(total_TD)
        return Residual(total_TD)

    def _received(self, positions_T: Tensor) -> Residual:
        assert self.exchange is not None, "a stage that has no other before it"
        hidden_TD, *updates = self.exchange.receive(positions_T, 1 + self.carries_update)
        return Residual(hidden_TD, *updates)

    def _send(self, residual: Residual) -> None:
        assert self.exchange is not None, "a stage that has no other after it"
        assert (residual.update_TD is not None) == self.carries_update, "the next stage expects another residual"
        self.exchange.send([part for part in (residual.hidden_TD, residual.update_TD) if part is not None])
