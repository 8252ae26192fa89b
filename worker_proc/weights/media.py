"""Checkpoints of models that read images or audio: tensors of the language model, and tensors of the tower."""

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from octavo.kernels.linear import Packer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.media import Kind
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.models.vision.registry import build_towers
from octavo.worker_proc.models.vision.tower import MediaTower, TowerSpec
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.dummy import fill_dummy
from octavo.worker_proc.weights.reader import Wants, read_weights

_LANGUAGE_MODEL = re.compile(r"^(model\.)?(language_model|text_model)\.")
_TOWER = re.compile(
    r"^(model\.)?"
    r"(vision_tower|vision_model|visual|visual_projection|audio_tower|encoder|multi_modal_projector|connector"
    r"|image_newline|embed_tokens_extend)\b"
)


def text_name(name: str) -> str | None:
    """Return the name that a checkpoint of the language model alone gives a tensor; `None` if it is the tower's."""
    name = name.removeprefix("vlm.")
    if _TOWER.match(name):
        return None
    return _LANGUAGE_MODEL.sub(lambda found: found[1] or "", name)


def read_text_weights(
    facts: ModelFacts, report: Callable[[float], None], wants: Wants
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Yield the weights of a model, or of its language model if it reads media; see `read_weights`."""
    if facts.media is None:
        yield from read_weights(facts, report, wants)
        return

    def wants_text(name: str) -> bool:
        own = text_name(name)
        return own is not None and wants(own)

    for name, values in read_weights(facts, report, wants_text):
        own = text_name(name)
        assert own is not None, "what is not wanted is not read"
        yield own, values


def load_towers(config: ResolvedConfig, model: Model) -> dict[Kind, MediaTower | ItemEncoder]:
    """Return the tower of each kind of media that a model reads; {} if this worker has none.

    Their weights are as precise as in the checkpoint, except that w8a8 quantizes an encoder for cross-attention: it has
    many rows, and other quantizations speed up only steps with few rows.

    Every rank of the first pipeline stage has complete towers; other stages have none.

    Raises:
        ConfigError: a tower is not supported, or a tensor is missing or has another shape.
    """
    if config.media is None or not model.stage.is_first:
        return {}
    assert config.model.media is not None, "a model that reads media"
    towers = build_towers(
        TowerSpec(
            facts=config.model.media,
            width=config.model.embedding_width,
            placement=Placement(model.dtype, model.device),
            library=model.library,
            max_item_tokens=min(config.media.max_item_tokens, config.max_model_len),
        )
    )
    is_quantized = config.quantization == "w8a8" and config.model.media.attended_rows > 0
    for tower in dict.fromkeys(towers.values()):
        _fill(tower, config)
        tower.parameters.pack(Packer(model.device, native=model.library, quantization="w8a8" if is_quantized else None))
    return towers


def _fill(tower: MediaTower | ItemEncoder, config: ResolvedConfig) -> None:
    if config.model.load_format == "dummy":
        fill_dummy(tower.parameters.named(), config.seed)
        return
    wants = tower.parameters.wants
    tower.parameters.load(
        read_weights(config.model, lambda fraction: None, lambda name: text_name(name) is None and wants(name))
    )
