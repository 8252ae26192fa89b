"""Tiny random CLIP, SigLIP, ColPali and ColQwen2, with real image processors of `transformers`, and tokenizers."""

import json
from pathlib import Path
from typing import Any

import tiny_media
import tiny_models
import transformers
from tiny_models import BOS, EOS, VOCAB_SIZE
from tokenizers.processors import TemplateProcessing
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 6,
}


def make_clip(directory: Path) -> Path:
    """Write a CLIP: 25 patches and a class token, and texts that attend to earlier tokens; vectors of 24 numbers."""
    config = transformers.CLIPConfig(
        text_config={**_TEXT, "projection_dim": 24},
        vision_config={**_VISION, "projection_dim": 24},
        projection_dim=24,
    )
    image_processor = transformers.CLIPImageProcessor(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})
    return _write(directory, transformers.CLIPModel(config), image_processor, f"{BOS} $A {EOS}")


def make_siglip(directory: Path) -> Path:
    """Write a SigLIP: 25 patches that one learned query attends to, and padded texts; vectors of 40 numbers."""
    config = transformers.SiglipConfig(text_config={**_TEXT, "projection_size": 40}, vision_config=_VISION)
    image_processor = SiglipImageProcessorPil(size={"height": 30, "width": 30})
    return _write(directory, transformers.SiglipModel(config), image_processor, f"$A {EOS}")


def _write(directory: Path, model: transformers.PreTrainedModel, image_processor: Any, form: str) -> Path:
    tokenizer = tiny_models._tokenizer()
    special = [(text, tokenizer.token_to_id(text)) for text in (BOS, EOS) if text in form]
    tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=special)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    tiny_models._randomize(model, seed=7)
    for part in (model, image_processor, fast):
        part.save_pretrained(directory)
    return directory


def make_colqwen2(directory: Path) -> Path:
    """Write a ColQwen2: the Qwen2-VL of `tiny_media`, and vectors of 24 numbers for its tokens."""
    tiny_media.make_qwen2_vl(directory)
    inner = transformers.Qwen2VLConfig.from_pretrained(directory)
    model = transformers.ColQwen2ForRetrieval(transformers.ColQwen2Config(vlm_config=inner, embedding_dim=24))
    tiny_models._randomize(model, seed=5)
    model.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "ColQwen2Processor"}))
    return directory


def make_colpali(directory: Path) -> Path:
    """Write a ColPali: 25 patches are rows of a Gemma, and its tokens have vectors of 24 numbers."""
    tokenizer = tiny_media._tokenizer("<bos>", "<pad>")
    tokenizer.bos_token, tokenizer.pad_token = "<bos>", "<pad>"
    text = transformers.GemmaConfig(**{**tiny_media._TEXT, "vocab_size": len(tokenizer)})
    vision = transformers.SiglipVisionConfig(**_VISION, vision_use_head=False)
    inner = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=VOCAB_SIZE, projection_dim=48, hidden_size=48
    )
    model = transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=inner, embedding_dim=24))
    tiny_models._randomize(model, seed=5)
    image_processor = SiglipImageProcessorPil(size={"height": 30, "width": 30}, image_seq_length=25)
    for part in (model, image_processor, tokenizer):
        part.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "ColPaliProcessor"}))
    return directory
