"""Tiny random models that read images, each with a real processor of `transformers`, and random pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import transformers
from PIL import Image
from tiny_models import EOS, MAX_POSITIONS, VOCAB_SIZE
from tokenizers import AddedToken
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 1,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": 1,
}
_VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 6,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 6,
    "projection_dim": 24,
}


def picture(seed: int, width: int = 44, height: int = 33) -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(shown: Image.Image) -> str:
    """Return the URL that has a picture as PNG."""
    file = io.BytesIO()
    shown.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_llava(directory: Path, **changes: Any) -> Path:
    """Write a LLaVA-1.5: a CLIP tower of 25 patches, a projector and a Llama. `changes` are of its configuration."""
    text = transformers.LlamaConfig(**_TEXT)
    vision = transformers.CLIPVisionConfig(**_CLIP)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB_SIZE, **changes)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}
        ),
        tokenizer=_tokenizer(),
        patch_size=6,
        vision_feature_select_strategy=changes.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    return _write(directory, transformers.LlavaForConditionalGeneration(config), processor)


def make_llava_next(directory: Path, *, family: str = "LlavaNext") -> Path:
    """Write a LLaVA-NeXT, or a LLaVA-OneVision with a SigLIP tower: an overview of 9 patches, and tiles of as many."""
    sizes, tower = [[18, 36], [36, 18], [36, 36]], {**_CLIP, "image_size": 18}
    image_processors = {"LlavaNext": LlavaNextImageProcessorPil, "LlavaOnevision": LlavaOnevisionImageProcessorPil}
    is_onevision = family == "LlavaOnevision"
    picture_size = {"height": 18, "width": 18}
    image_processor = image_processors[family](
        image_grid_pinpoints=sizes,
        size=picture_size if is_onevision else {"shortest_edge": 18},
        crop_size=None if is_onevision else picture_size,
    )
    tokenizer = _tokenizer(*["<video>"] * is_onevision)
    sizes_of_text = {**_TEXT, "vocab_size": len(tokenizer)}
    text: Any = (transformers.Qwen2Config if is_onevision else transformers.MistralConfig)(**sizes_of_text)
    vision: Any = transformers.SiglipVisionConfig(**tower, vision_use_head=False) if is_onevision else None
    changes: dict[str, Any] = {"vision_aspect_ratio": "anyres_max_2"} if is_onevision else {}
    marks = {"video_token_index": VOCAB_SIZE + 1} if is_onevision else {}
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision or transformers.CLIPVisionConfig(**tower),
        image_token_index=VOCAB_SIZE,
        image_grid_pinpoints=sizes,
        **changes,
        **marks,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    settings = {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if is_onevision:
        settings = {"num_image_tokens": 9, "vision_feature_select_strategy": "full", **changes}
        _write_video_settings(directory, size=picture_size)
    return _write_parts(directory, model, f"{family}Processor", image_processor, tokenizer, **settings)


def make_internvl(directory: Path) -> Path:
    """Write an InternVL: tiles of 16 patches and a class token, of which four patches are a row."""
    marks = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(*marks.values(), image="<IMG_CONTEXT>").backend_tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens={"context_image_token": "<IMG_CONTEXT>", **marks},
    )
    vision = transformers.InternVLVisionConfig(
        **{**_VISION, "image_size": [24, 24], "patch_size": [6, 6]}, attention_bias=True, layer_scale_init_value=0.7
    )
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**{**_TEXT, "vocab_size": len(tokenizer)}),
        vision_config=vision,
        image_token_id=VOCAB_SIZE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    image_processor = GotOcr2ImageProcessorPil(
        size={"height": 24, "width": 24}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    model = transformers.InternVLForConditionalGeneration(config)
    return _write_parts(directory, model, "InternVLProcessor", image_processor, tokenizer, image_seq_length=4)


def make_mistral3(directory: Path, *, family: str = "Mistral3") -> Path:
    """Write a Mistral 3, or a LLaVA with Pixtral's tower: lines of patches, or of squares of four, between marks."""
    is_merged = family == "Mistral3"
    tokenizer = _tokenizer("[IMG_BREAK]", "[IMG_END]", image="[IMG]")
    vision = transformers.PixtralVisionConfig(**{**_VISION, "hidden_size": 32, "image_size": 48, "rope_theta": 1000.0})
    only = {"spatial_merge_size": 2} if is_merged else {"vision_feature_select_strategy": "full"}
    config = getattr(transformers, f"{family}Config")(
        text_config=transformers.MistralConfig(**{**_TEXT, "vocab_size": len(tokenizer)}, sliding_window=None),
        vision_config=vision,
        image_token_index=VOCAB_SIZE,
        vision_feature_layer=-1,
        **only,
    )
    image_processor = PixtralImageProcessorPil(size={"longest_edge": 48 if is_merged else 36}, patch_size=6)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    settings = {"patch_size": 6, "spatial_merge_size": 1 + is_merged}
    return _write_parts(directory, model, "PixtralProcessor", image_processor, tokenizer, **settings)


def make_smolvlm(directory: Path, *, family: str = "Idefics3", **changes: Any) -> Path:
    """Write an Idefics3 or a SmolVLM: tiles of 16 patches, of which four are a row. `changes`: of its configuration."""
    fake, turn = "<fake_token_around_image>", "<end_of_utterance>"
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(fake, turn, "<global-img>", *tiles)
    text = transformers.LlamaConfig(**{**_TEXT, "vocab_size": len(tokenizer)})
    vision = getattr(transformers, f"{family}VisionConfig")(**{**_VISION, "image_size": 24})
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE, scale_factor=2, **changes
    )
    image_processor = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 48}, max_image_size={"longest_edge": 24}
    )
    if family == "SmolVLM":
        _write_video_settings(directory, size={"longest_edge": 24}, max_image_size={"longest_edge": 24})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return _write_parts(directory, model, f"{family}Processor", image_processor, tokenizer, image_seq_len=4)


def make_qwen2_vl(directory: Path, **changes: Any) -> Path:
    """Write a Qwen2-VL: squares of four patches are a row, and positions have three axes. `changes`: of the tower."""
    sizes = {"depth": 2, "embed_dim": 32, "hidden_size": 96, "mlp_ratio": 2, "num_heads": 4, "patch_size": 6}
    return _make_qwen(directory, "Qwen2VL", {**sizes, **changes})


def make_qwen25_vl(directory: Path) -> Path:
    """Write a Qwen2.5-VL: the first layer of its tower attends within windows of two by two squares."""
    sizes: dict[str, Any] = {"depth": 3, "hidden_size": 32, "intermediate_size": 52, "num_heads": 4, "patch_size": 6}
    windows = {"out_hidden_size": 96, "window_size": 24, "fullatt_block_indexes": [1]}
    return _make_qwen(directory, "Qwen2_5_VL", {**sizes, **windows})


def make_qwen3_vl(directory: Path) -> Path:
    """Write a Qwen3-VL: results of two layers of its tower are added after the first layers of the language model."""
    sizes: dict[str, Any] = {"depth": 3, "hidden_size": 32, "intermediate_size": 52, "num_heads": 4, "patch_size": 6}
    deeper = {"out_hidden_size": 96, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    return _make_qwen(directory, "Qwen3VL", {**sizes, **deeper}, mrope_interleaved=True)


def make_qwen3_vl_moe(directory: Path) -> Path:
    """Write a Qwen3-VL whose language model has experts."""
    sizes: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 52, "num_heads": 4, "patch_size": 6}
    deeper = {"out_hidden_size": 96, "num_position_embeddings": 25, "deepstack_visual_indexes": [0]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return _make_qwen(directory, "Qwen3VLMoe", {**sizes, **deeper}, experts, mrope_interleaved=True)


def _make_qwen(
    directory: Path, family: str, sizes: dict[str, Any], text_changes: dict[str, Any] | None = None, **rope_changes: Any
) -> Path:
    pad = "<|image_pad|>"
    tokenizer = _tokenizer("<|video_pad|>", "<|vision_start|>", "<|vision_end|>", image=pad)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3], **rope_changes}
    text = getattr(transformers, f"{family}TextConfig")(
        **{**_TEXT, "vocab_size": len(tokenizer), "hidden_size": 96, **(text_changes or {})}, rope_parameters=rope
    )
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=getattr(transformers, f"{family}VisionConfig")(**sizes),
        image_token_id=VOCAB_SIZE,
        video_token_id=VOCAB_SIZE + 1,
        vision_start_token_id=VOCAB_SIZE + 2,
        vision_end_token_id=VOCAB_SIZE + 3,
    )
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=6, merge_size=2, size={"shortest_edge": 144, "longest_edge": 144 * 12}
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return _write_parts(directory, model, f"{family.removesuffix('Moe')}Processor", image_processor, tokenizer)


def make_gemma3(directory: Path) -> Path:
    """Write a Gemma 3: squares of four patches are a row; the nine rows of an image attend to each other."""
    begin, end = "<start_of_image>", "<end_of_image>"
    tokenizer = _tokenizer(begin, end, image="<image_soft_token>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens={"image_token": "<image_soft_token>", "boi_token": begin, "eoi_token": end},
    )
    text = transformers.Gemma3TextConfig(
        **{**_TEXT, "vocab_size": len(tokenizer), "hidden_size": 96, "num_hidden_layers": 3},
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,  # tied, it repeats its last token
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    vision = transformers.SiglipVisionConfig(**{**_VISION, "image_size": 36})
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=9,
        tie_word_embeddings=False,
        image_token_index=VOCAB_SIZE,
        boi_token_index=VOCAB_SIZE + 1,
        eoi_token_index=VOCAB_SIZE + 2,
    )
    processor = transformers.Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 36, "width": 36}),
        tokenizer=tokenizer,
        image_seq_length=9,
        chat_template=CHAT_TEMPLATE.replace(IMAGE, begin),
    )
    return _write(directory, transformers.Gemma3ForConditionalGeneration(config), processor)


def _write_video_settings(directory: Path, **settings: Any) -> None:
    normal = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]}
    (directory / "video_preprocessor_config.json").write_text(json.dumps({**normal, **settings}))


def _tokenizer(*marks: str, image: str = IMAGE) -> transformers.PreTrainedTokenizerFast:
    tokenizer = tiny_models._tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (image, *marks)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def _write(directory: Path, model: transformers.PreTrainedModel, processor: transformers.ProcessorMixin) -> Path:
    tiny_models._randomize(model, seed=11)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def _write_parts(
    directory: Path,
    model: transformers.PreTrainedModel,
    processor: str,
    image_processor: Any,
    tokenizer: transformers.PreTrainedTokenizerFast,
    **settings: Any,
) -> Path:
    """Write a model whose processor has a part for videos, which cannot be made without torchvision.

    `settings`: of the processor.
    """
    tiny_models._randomize(model, seed=11)
    for part in (model, image_processor, tokenizer):
        part.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": processor, **settings}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
