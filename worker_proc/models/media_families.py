"""The models that read images, videos or audio, as docs/multimodal.md lists them. A test compares it with the code."""

from dataclasses import dataclass

from octavo.protocol.media import Kind


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """Architectures with one kind of tower."""

    name: str
    """Display name."""
    architectures: tuple[str, ...]
    """Architectures as in `config.json`."""
    kinds: tuple[Kind, ...]
    """Kinds of media that the models read."""
    tower: str
    """How media become rows."""
    text: str
    """The language model that reads the rows."""


_LLAVA_TEXT = "Llama, Mistral, Qwen2, Qwen3"

MEDIA_FAMILIES = (
    MediaFamily(
        "SmolVLM, SmolVLM2",
        ("SmolVLMForConditionalGeneration",),
        ("image", "video"),
        "SigLIP over tiles, squares of patches are one row",
        "Llama",
    ),
    MediaFamily("Idefics3", ("Idefics3ForConditionalGeneration",), ("image",), "as SmolVLM", "Llama"),
    MediaFamily(
        "Qwen2-VL",
        ("Qwen2VLForConditionalGeneration",),
        ("image", "video"),
        "patches of images of any size, rotated by row and column; squares of patches are one row",
        "Qwen2, with positions on three axes (M-RoPE)",
    ),
    MediaFamily(
        "Qwen2.5-VL",
        ("Qwen2_5_VLForConditionalGeneration",),
        ("image", "video"),
        "as Qwen2-VL; most layers attend within windows of the image",
        "as Qwen2-VL",
    ),
    MediaFamily(
        "Qwen3-VL",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        ("image", "video"),
        "as Qwen2-VL with learned positions; results of several layers are added after the first layers of the "
        "language model (DeepStack)",
        "Qwen3, Qwen3-MoE, with interleaved M-RoPE",
    ),
    MediaFamily(
        "Gemma 3",
        ("Gemma3ForConditionalGeneration",),
        ("image",),
        "SigLIP, the mean of each square of patches is one row",
        "Gemma 3: the rows of an image attend to each other in both directions",
    ),
    MediaFamily(
        "Llama 4",
        ("Llama4ForConditionalGeneration",),
        ("image",),
        "patches rotated by row and column over tiles and the whole image; squares of patches are one row, marks "
        "between tiles",
        "Llama 4: attention in chunks of positions, mixture of experts",
    ),
    MediaFamily(
        "LLaVA-1.5, Pixtral",
        ("LlavaForConditionalGeneration",),
        ("image",),
        "CLIP, SigLIP, or that of Pixtral",
        _LLAVA_TEXT,
    ),
    MediaFamily(
        "LLaVA-NeXT",
        ("LlavaNextForConditionalGeneration",),
        ("image",),
        "CLIP over an overview and tiles of the image, a learned row after each line",
        _LLAVA_TEXT,
    ),
    MediaFamily(
        "LLaVA-OneVision",
        ("LlavaOnevisionForConditionalGeneration",),
        ("image", "video"),
        "as LLaVA-NeXT with SigLIP; rows of large images are interpolated",
        _LLAVA_TEXT,
    ),
    MediaFamily(
        "Mistral Small 3.1",
        ("Mistral3ForConditionalGeneration",),
        ("image",),
        "that of Pixtral: patches of images of any size, rotated by row and column, marks between lines; squares of "
        "patches are one row",
        "Mistral",
    ),
    MediaFamily(
        "InternVL (checkpoints that end in `-hf`)",
        ("InternVLForConditionalGeneration",),
        ("image",),
        "InternViT over tiles, squares of patches are one row",
        "Qwen2, Qwen3, Llama",
    ),
    MediaFamily(
        "[Phi-4-multimodal](#phi-4-multimodal)",
        ("Phi4MultimodalForCausalLM",),
        ("image", "audio"),
        "SigLIP over an overview and tiles of the image; the mean of each square of patches is one row, learned rows "
        "end lines. Audio: a conformer over windows of 40 seconds; eight frames are one row, 12.5 in a second",
        "Phi-4-mini",
    ),
    MediaFamily(
        "[Qwen2-Audio](#audio-in-conversations)",
        ("Qwen2AudioForConditionalGeneration",),
        ("audio",),
        "Whisper's; the mean of two results is one row, 25 in a second",
        "Qwen2",
    ),
    MediaFamily(
        "[Voxtral](#audio-in-conversations)",
        ("VoxtralForConditionalGeneration",),
        ("audio",),
        "Whisper's over windows of 30 seconds; four results side by side are one row, 375 in a window",
        "Llama",
    ),
    MediaFamily(
        "[Whisper](#audio)",
        ("WhisperForConditionalGeneration",),
        ("audio",),
        "its own, for transcription",
        "its own decoder, which attends to the audio",
    ),
    MediaFamily(
        "[CLIP, SigLIP](pooling.md#vectors-of-images)",
        ("CLIPModel", "SiglipModel"),
        ("image",),
        "their own: an image is one vector",
        "their own text model",
    ),
    MediaFamily(
        "[ColPali](pooling.md#vectors-of-images)",
        ("ColPaliForRetrieval",),
        ("image",),
        "SigLIP of PaliGemma: vectors of all patches",
        "Gemma",
    ),
    MediaFamily(
        "[ColQwen2](pooling.md#vectors-of-images)",
        ("ColQwen2ForRetrieval",),
        ("image",),
        "that of Qwen2-VL: vectors of all rows",
        "Qwen2",
    ),
)
