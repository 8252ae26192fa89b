"""Whisper's encoder: two convolutions over a spectrogram, and layers whose attention has both directions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import (
    Floats,
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    array_of,
)

FEATURES = "input_features"
"""The tensor of an item: a spectrogram in float32, mel bands by frames."""
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """Sizes of an encoder."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_rows: int
    """Rows of the longest audio clip: one row per two frames."""
    num_mels: int
    activation: str

    @classmethod
    def read(cls, config: CheckedConfig) -> "EncoderSizes":
        """Read the keys that Whisper has.

        Raises:
            ConfigError: a key is missing, or a value is not supported.
        """
        reject_unless(config, "scale_embedding", [False])
        read = cls(
            width=required(config, "d_model", int),
            inner_width=required(config, "encoder_ffn_dim", int),
            num_layers=required(config, "encoder_layers", int),
            num_heads=required(config, "encoder_attention_heads", int),
            num_rows=required(config, "max_source_positions", int),
            num_mels=required(config, "num_mel_bins", int),
            activation=activation(config, "gelu", PLAIN, key="activation_function"),
        )
        if read.width % read.num_heads:
            raise ConfigError(
                f"config.json: d_model is {read.width}, which encoder_attention_heads ({read.num_heads}) do not divide"
            )
        return read


class WhisperEncoder(MediaTower):
    """The tower. `Patches.rows_TP` of its sequences are whole spectrograms, mel bands by frames.

    Its convolutions run through torch in float32, one item at a time and before the layers, so their bits depend on the
    item alone; its layers run like those of image towers."""

    num_mels: int
    convolutions: Sequence[tuple[Tensor, Tensor]]
    """Weights and biases."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> Iterable[Patches]:
        """See `MediaTower.patches`: one sequence, with one row per two frames.

        Raises:
            ProtocolError: the spectrogram has another size.
        """
        frames_CF = array_of(tensors, FEATURES, np.float32, 2)
        num_rows = self.max_item_rows
        if frames_CF.shape != (self.num_mels, 2 * num_rows):
            raise ProtocolError(f"{FEATURES} of shape {frames_CF.shape}, not {(self.num_mels, 2 * num_rows)}")
        return [patches_of(frames_CF, num_rows)]

    def put(self, sequences: Sequence[Patches]) -> None:
        """See `MediaTower.put`."""
        rows_TD = torch.cat([self._convolved(torch.from_numpy(one.rows_TP.copy()), one) for one in sequences])
        self._inputs_XP[: len(rows_TD)] = rows_TD

    def send(self, sequences: Sequence[Patches], stream: Stream) -> None:
        """See `MediaTower.send`."""
        rows = [self._convolved(upload_array(stream, one.rows_TP.copy()), one) for one in sequences]
        self._inputs_XP = torch.cat(rows).to(self.dtype)

    def blank(self, num_rows: int) -> Patches:
        """See `MediaTower.blank`."""
        frames_CF = np.zeros((self.num_mels, 2 * num_rows), dtype=np.float32)
        return Patches(frames_CF, np.zeros(num_rows, dtype=np.int64), np.arange(num_rows))

    def _convolved(self, frames_CF: Tensor, clip: Patches) -> Tensor:
        """Return the convolved spectrogram, one row per two frames, up to the last row of an audio clip."""
        x = frames_CF.unsqueeze(0)
        for (weight, bias), stride in zip(self.convolutions, (1, 2), strict=True):
            x = gelu(conv1d(x, weight.float(), bias.float(), stride=stride, padding=1))
        return x[0].T[: len(clip.positions_T)]


def patches_of(frames_CF: Floats, num_rows: int) -> Patches:
    """Return the first rows of a spectrogram as a sequence of the encoder, with all its results."""
    positions_T = np.arange(num_rows)
    return Patches(frames_CF, positions_T, positions_T)


def whisper_rules() -> list[Rule]:
    """Return the rules for the tensors of a checkpoint, encoder and decoder."""
    return [renamed({r"\.out_proj\.": ".o_proj."}), _with_key_bias]


def _with_key_bias(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Add the bias of keys, which Whisper does not have: zeros."""
    yield name, values
    if name.endswith(".k_proj.weight") and len(values.shape) > 1:
        yield name.removesuffix("weight") + "bias", torch.zeros(values.shape[0])


Encoder = TypeVar("Encoder", bound=WhisperEncoder)


def assemble(
    kind: type[Encoder],
    spec: TowerSpec,
    sizes: EncoderSizes,
    parameters: Parameters,
    *,
    project: Callable[[Tensor], Tensor],
    merged: MergedProjection | None = None,
) -> Encoder:
    """Make an encoder of this family; its parameters are uninitialized.

    Args:
        kind: class of the tower.
        spec: what the model is built for.
        sizes: sizes of its layers.
        parameters: parameters of all parts.
        project: see `MediaTower`.
        merged: see `MediaTower`.
    """
    width, head_dim = sizes.width, sizes.width // sizes.num_heads
    shape = AttentionShape(sizes.num_heads, sizes.num_heads, head_dim, head_dim**-0.5, is_causal=False)
    convolutions = tuple(
        (parameters.new(f"conv{number}.weight", width, inputs, 3), parameters.new(f"conv{number}.bias", width))
        for number, inputs in ((1, sizes.num_mels), (2, width))
    )
    positions_LD = parameters.new("embed_positions.weight", sizes.num_rows, width)
    norm = partial(LayerNorm.new, parameters, width=width, eps=EPS)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, rotary=None, has_qkv_bias=True, has_output_bias=True
        )
        mlp = Mlp(parameters, name, width, sizes.inner_width, activation=sizes.activation, has_bias=True)
        return PreNormLayer(norm(f"{name}.self_attn_layer_norm"), attention, norm(f"{name}.final_layer_norm"), mlp)

    tower = kind(
        parameters,
        [shape] * sizes.num_layers,
        width=width,
        patch_width=width,
        max_item_rows=sizes.num_rows,
        embed=lambda rows_TD, positions_T: rows_TD + embedding(positions_T, positions_LD),
        layers=[layer(index) for index in range(sizes.num_layers)],
        project=project,
        library=spec.library,
        merged=merged,
    )
    tower.num_mels, tower.convolutions = sizes.num_mels, convolutions
    return tower


def build(spec: TowerSpec) -> WhisperEncoder:
    """Make the encoder; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    sizes = EncoderSizes.read(CheckedConfig(spec.facts.hf_config))  # the decoder's keys are checked with the decoder
    parameters = Parameters(spec.placement, prefixes=["model.encoder.", "encoder."], rules=whisper_rules())
    return assemble(
        WhisperEncoder,
        spec,
        sizes,
        parameters,
        project=LayerNorm.new(parameters, "layer_norm", sizes.width, EPS),
    )
