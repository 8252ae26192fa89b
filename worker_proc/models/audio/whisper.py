"""Whisper's encoder: two convolutions over a spectrogram, and layers whose attention has both directions."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import Patches, TowerSpec, VisionTower, array_of

FEATURES = "input_features"
"""The tensor of an item: a spectrogram in float32, mel bands by frames."""
_EPS = 1e-5


class WhisperEncoder(VisionTower):
    """The tower. Its convolutions run through torch in float32, one item at a time, so their bits depend on the item
    alone; layers run as those of vision towers."""

    num_mels: int
    convolutions: Sequence[tuple[Tensor, Tensor]]
    """Weights and biases."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `VisionTower.patches`: what the convolutions make of a spectrogram, a row for two frames.

        Raises:
            ProtocolError: the spectrogram has another size.
        """
        frames_CF = array_of(tensors, FEATURES, np.float32, 2)
        num_rows = self.max_item_rows
        if frames_CF.shape != (self.num_mels, 2 * num_rows):
            raise ProtocolError(f"{FEATURES} of shape {frames_CF.shape}, not {(self.num_mels, 2 * num_rows)}")
        x = torch.from_numpy(frames_CF.copy()).unsqueeze(0)
        for (weight, bias), stride in zip(self.convolutions, (1, 2), strict=True):
            x = gelu(conv1d(x, weight.float(), bias.float(), stride=stride, padding=1))
        positions_T = np.arange(num_rows)
        return [Patches(np.ascontiguousarray(x[0].T.numpy()), positions_T, positions_T)]


def whisper_rules() -> list[Rule]:
    """Return what becomes of the tensors of a checkpoint, encoder and decoder."""
    return [renamed({r"\.out_proj\.": ".o_proj."}), _with_key_bias]


def _with_key_bias(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Add the bias of keys, which Whisper does not have: zeros."""
    yield name, values
    if name.endswith(".k_proj.weight") and len(values.shape) > 1:
        yield name.removesuffix("weight") + "bias", torch.zeros(values.shape[0])


def build(spec: TowerSpec) -> WhisperEncoder:
    """Make the encoder; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    width = spec.width
    config = CheckedConfig(spec.facts.hf_config)  # the decoder's keys are checked with the decoder
    num_layers, num_heads = config["encoder_layers"], config["encoder_attention_heads"]
    num_rows, num_mels = config["max_source_positions"], config["num_mel_bins"]
    if width % num_heads:
        raise ConfigError(f"config.json: d_model is {width}, which encoder_attention_heads ({num_heads}) do not divide")
    shape = AttentionShape(num_heads, num_heads, width // num_heads, (width // num_heads) ** -0.5, is_causal=False)
    parameters = Parameters(spec.placement, prefixes=["model.encoder.", "encoder."], rules=whisper_rules())
    convolutions = tuple(
        (parameters.new(f"conv{number}.weight", width, inputs, 3), parameters.new(f"conv{number}.bias", width))
        for number, inputs in ((1, num_mels), (2, width))
    )
    positions_LD = parameters.new("embed_positions.weight", num_rows, width)
    norm = partial(LayerNorm.new, parameters, width=width, eps=_EPS)
    function = activation(config, "gelu", PLAIN, key="activation_function")

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, rotary=None, has_qkv_bias=True, has_output_bias=True
        )
        mlp = Mlp(parameters, name, width, config["encoder_ffn_dim"], activation=function, has_bias=True)
        return PreNormLayer(norm(f"{name}.self_attn_layer_norm"), attention, norm(f"{name}.final_layer_norm"), mlp)

    tower = WhisperEncoder(
        parameters,
        [shape] * num_layers,
        width=width,
        patch_width=width,
        max_item_rows=num_rows,
        embed=lambda rows_TD, positions_T: rows_TD + embedding(positions_T, positions_LD),
        layers=[layer(index) for index in range(num_layers)],
        project=norm("layer_norm"),
        library=spec.library,
    )
    tower.num_mels, tower.convolutions = num_mels, convolutions
    return tower
