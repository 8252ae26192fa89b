"""What the worker needs from every model. Knows no architecture."""

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
    """The output of the last block, which the next norm adds; `None` if `hidden` has it."""

    def total(self) -> Tensor:
        """Return the sum so far."""
        return self.hidden_TD if self.update_TD is None else self.hidden_TD + self.update_TD

    def plus(self, update_TD: Tensor) -> "Residual":
        """Return the stream after the output of a block. The next norm adds it: a GPU does both in one pass."""
        return Residual(self.total(), update_TD)

    def normalized(self, norm: Norm) -> tuple["Residual", Tensor]:
        """Return the stream without an update, and its normalized sum."""
        if self.update_TD is None:
            return self, norm(self.hidden_TD)
        total_TD, normalized_TD = norm.fused_add_norm(self.hidden_TD, self.update_TD)
        return Residual(total_TD), normalized_TD


Tables = tuple[Tensor, ...]
"""What all layers look up by position, such as rotary angles; rows are those of the step."""


class StepAngles(Protocol):
    """Rotary angles that are made for each step, of a model that counts positions on several axes."""

    def put(self, axes_AT: npt.NDArray[np.int64], stream: Stream | None = None) -> None:
        """Make the angles of the next step, whose rows have these positions on each axis.

        `stream`: of the device, after whose work so far they are made; `None` means on the host, at once.
        """


class Layer(Protocol):
    """One layer of a decoder."""

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after this layer."""


@dataclass(frozen=True, slots=True, eq=False)
class DeeperLayer:
    """A layer whose results get further rows of images (DeepStack)."""

    layer: Layer
    rows_XD: Tensor
    """Of the step; zeros for tokens of text."""

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.base.Layer`."""
        residual = self.layer(residual, tables, attention)
        added_TD = all_given_rows(residual.hidden_TD, self.rows_XD)
        return replace(residual, hidden_TD=residual.hidden_TD + added_TD)


class CrossLayer(Protocol):
    """Attends to the item of a request: cross-attention."""

    shape: AttentionShape

    def keys_and_values(self, item_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_TKH and v_TKH of the rows of an item."""


class Weights(Protocol):
    """What has weights."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters."""


class Model(ABC):
    """A decoder: tokens in, hidden states and logits out. Keeps no state of any request.

    Callers run it under `torch.inference_mode()`.

    Args:
        parameters: parameters of all layers.
        shapes: shapes of the attention of each layer; `None` if it has none.
        states: state shape of each layer, `None` for a layer without a state. Empty if no layer has one.

    Raises:
        ConfigError: a model with states is divided between GPUs.
    """

    impl: ClassVar[ModelImpl] = "octavo"
    """What computes it."""
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
        """The library that computes its steps, and for which its weights are packed; `None` means torch."""
        self.given_rows: GivenRows | None = None
        """Rows in place of token embeddings; `None` if this worker takes none."""
        self.step_angles: StepAngles | None = None
        """Where the angles of a step's rows are put; `None` if they are looked up by the positions of the rows."""
        self.adapter_rows: AdapterRows | None = None
        """Which row of a step has which LoRA adapter, for layers outside of programs; `None` if there are no
        adapters."""
        self.cache_scales: Mapping[int, tuple[float, float]] = {}
        """By layer: what stored keys and values are multiplied by. Those of other layers are 1."""
        self.segment_stride = 0
        """Added to the positions of a prompt's second text (BERT's token types), so that they name other rows of one
        table; 0: the model does not tell the texts of a pair apart."""
        self.pooling_head: PoolingHead | None = None
        """The layers after pooling; `None` if the model generates tokens."""
        self.cross_layers: Sequence[CrossLayer] = ()
        """The layers that attend to what the tower has encoded."""
        self.exchange: StageExchange | None = None
        """The stages before and after; `None` if all layers are here."""
        self.features: Features | None = None
        """What a head reads of this model; `None` if there is no head."""
        self.head: Model | None = None
        """Drafts tokens for speculative decoding: a head, or a whole model; `None` if there is none."""
        self.towers: Mapping[Kind, Weights] = {}
        """What encodes each kind of media for this model; {}: the model reads tokens only, or another stage has them.
        One tower may be that of several kinds."""
        self.cross_cache: CrossCache | None = None
        """Keys and values of what the tower has encoded, if layers attend to it; made before steps are recorded."""
        self.stage = parameters.stage
        """The layers that are here."""
        self.cache_groups = group_layers(shapes, self.stage.layers)
        """The layers that are here, by the block tables that they share."""
        self.state_group: StateGroup | None = None
        """The layers that are here and have a state; `None` if no layer of the model has one."""
        if any(states):
            check_recurrent(parameters)
            own = {layer: state for layer, state in enumerate(states) if state and layer in self.stage.layers}
            self.state_group = StateGroup(own)

    @abstractmethod
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor | None:
        """Return hidden_TD, after the final norm; `None` if it is another stage that has it.

        Blocks until: the stage before is done with the step, if there is one.

        Args:
            token_ids_T: int64.
            positions_T: int64.
            attention: planned for this step.
        """

    @abstractmethod
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits_RV in the model's dtype for rows of `forward`'s result; these rows, if the model pools."""

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Compute the tables that requests of up to `max_model_len` tokens need."""

    def take_given_rows(self, max_rows: int, num_deeper: int = 0) -> None:
        """Let requests give rows in place of token embeddings: before a step is recorded.

        Args:
            max_rows: most rows of a step.
            num_deeper: see `GivenRows`.

        Raises:
            ConfigError: this model cannot.
        """
        raise ConfigError(
            "--enable-prompt-embeds: models that run through transformers take token ids only",
            hint="leave --enable-prompt-embeds out",
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters, those of a head and of towers included, and of given rows."""
        given_bytes = self.given_rows.num_bytes if self.given_rows else 0
        others: list[Weights] = [*dict.fromkeys(self.towers.values()), *([self.head] if self.head else [])]
        return self._parameters.num_bytes + given_bytes + sum([model.weights_bytes for model in others])

    @property
    def parameters(self) -> Parameters:
        """All tensors and weights, for filling and packing them."""
        return self._parameters

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all parameters, for writing into them."""
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
            packer: packer of the model's device, to pack weights meanwhile as `pack` does, which packs the rest; `None`
                if nothing is packed yet.
            keeps_quantized: see `pack`.
            packing: learns of each tensor that was read, in place of one with `packer`.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape, or a weight cannot be packed.
        """
        if packing is None and packer is not None:
            packing = StreamedPacking(self._parameters.linears, packer, keeps_quantized=keeps_quantized)
        self._parameters.load(weights, *([packing.take] if packing else []))

    def pack(self, packer: Packer, *, keeps_quantized: bool = False) -> None:
        """Pack the weights for the kernels: after loading, before the first step.

        Args:
            packer: packer of the model's device.
            keeps_quantized: whether weights that are quantized in the checkpoint stay so.
        """
        self._parameters.pack(packer, keeps_quantized=keeps_quantized)


class LayeredModel(Model):
    """A model of a family, made of our layers.

    `forward` is `begin`, the layers, and `end`. A pipeline stage begins or ends between two layers instead.
    """

    is_recordable = True
    carries_update: ClassVar[bool] = False
    """Whether the `Residual` between two layers has an `update`."""
    layers: Sequence[Layer]
    """All of them; the weights of those of other stages are missing."""
    _embedding: TokenEmbedding

    def take_given_rows(self, max_rows: int, num_deeper: int = 0) -> None:
        """See `Model.take_given_rows`; the first stage alone has embeddings."""
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
        """Return what a model looked up for its tokens, with the rows that requests give instead."""
        return x_TD if self.given_rows is None else self.given_rows.replace(x_TD, token_ids_T)

    @abstractmethod
    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """Return the embeddings, and what the layers look up.

        Args:
            token_ids_T: int64.
            positions_T: int64.
        """

    def tables(self, positions_T: Tensor) -> Tables:
        """Return what the layers look up, for a stage that does not begin with the embeddings."""
        return ()

    @abstractmethod
    def end(self, residual: Residual) -> Tensor:
        """Return hidden_TD, after the final norm, for `logits`."""

    def run_layers(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after the layers that are here; `attention` is planned for this step."""
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
        """Return the residual stream before a layer, which the head has seen if it reads it."""
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
