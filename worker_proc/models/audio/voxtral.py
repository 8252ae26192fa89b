"""Voxtral: neighbouring results of Whisper's encoder, through two linear layers, are a row of the prompt."""

from collections.abc import Mapping

import numpy as np

from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.audio.qwen2_audio import PREFIXES, READ_ELSEWHERE, read_sizes
from octavo.worker_proc.models.audio.whisper import (
    EPS,
    FEATURES,
    WhisperEncoder,
    assemble,
    patches_of,
    whisper_rules,
)
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.llava import PROJECTOR_NAMES
from octavo.worker_proc.models.vision.tower import MergedProjection, Patches, TowerSpec, array_of

_OF_WHISPER = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
"""Keys of `audio_config`, and their names in Whisper."""


class VoxtralTower(WhisperEncoder):
    """The encoder with its projector."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence per window of an audio clip, all of the same length.

        Raises:
            ProtocolError: the windows have another size.
        """
        windows_NCF = array_of(tensors, FEATURES, np.float32, 3)
        size = self.num_mels, 2 * self.max_item_rows
        if windows_NCF.shape[1:] != size:
            raise ProtocolError(f"{FEATURES} of shape {windows_NCF.shape}, not windows of {size}")
        return [patches_of(frames_CF, self.max_item_rows) for frames_CF in windows_NCF]


def build(spec: TowerSpec) -> VoxtralTower:
    """Make the encoder; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *READ_ELSEWHERE)
    renamed_keys = {_OF_WHISPER.get(key, key): value for key, value in config["audio_config"].items()}
    sizes = read_sizes(renamed_keys, spec.facts.architecture)
    num_merged, rest = divmod(sizes.inner_width, sizes.width)
    if rest or sizes.num_rows % num_merged:
        raise ConfigError(
            f"config.json: {sizes.num_rows} results of {sizes.width} numbers are not rows of {sizes.inner_width}"
        )
    rules = [*whisper_rules(), renamed(PROJECTOR_NAMES)]
    parameters = Parameters(spec.placement, prefixes=PREFIXES, rules=rules)
    norm = LayerNorm.new(parameters, "layer_norm", sizes.width, EPS)
    projector = Mlp(
        parameters,
        "projector",
        sizes.inner_width,
        spec.width,
        num_outputs=spec.width,
        has_bias=False,
        activation=activation(config, "gelu", PLAIN, key="projector_hidden_act"),
    )
    config.reject_unread(spec.facts.architecture)
    merged = MergedProjection(num_merged, projector)
    return assemble(VoxtralTower, spec, sizes, parameters, project=norm, merged=merged)
