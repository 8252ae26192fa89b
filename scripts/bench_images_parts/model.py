"""A checkpoint of the shape of SmolVLM-256M with random weights, and its conversion for llama.cpp."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from bench_cpu_parts import models

from octavo.protocol.env import Env

_TURN = "<end_of_utterance>"
_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}" + _TURN + "\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_VOCAB_SIZE = 49_280


def make(longest_edge: int) -> Path:
    """Return the checkpoint in bfloat16, written on the first call.

    The language model has SmolLM2-135M's shape with a separate head. The tower is SigLIP's base model, with patches of
    16 pixels in tiles of 512; 4 x 4 neighbouring patches make a row. The tokenizer is SmolLM2's with image markers.

    Args:
        longest_edge: pixels to which an image's longer edge is enlarged, in tiles of 512; 2048 in the published files.
    """
    directory = Env.read().cache_dir / "models" / f"smolvlm-256m-shape-{longest_edge}"
    if (directory / "model.safetensors").is_file():
        return directory
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.directory("smollm2"))
    marks = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<fake_token_around_image>", "<image>", _TURN, "<global-img>", *marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    text = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],  # the class that llama.cpp's converter reads
        vocab_size=_VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = transformers.models.idefics3.Idefics3VisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=512,
        patch_size=16,
    )
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    processor = transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(
            size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 512}
        ),
        tokenizer=tokenizer,
        image_seq_len=64,
        chat_template=_CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def gguf(directory: Path, llama_source: Path) -> tuple[Path, Path]:
    """Return the language model and the tower in llama.cpp's format, written by its own converter on the first call.

    Args:
        directory: the checkpoint.
        llama_source: source directory of llama.cpp, with `convert_hf_to_gguf.py`.

    Raises:
        SystemExit: the converter failed; the message has its last lines. It needs sentencepiece.
    """
    found = []
    for name, flags in (("text", []), ("mmproj", ["--mmproj"])):
        target = directory.parent / f"{directory.name}.{name}.gguf"
        if not target.is_file():
            command: list[str | Path] = [sys.executable, llama_source / "convert_hf_to_gguf.py", directory]
            command += ["--outtype", "bf16", "--outfile", target, *flags]
            paths = [str(llama_source / "gguf-py"), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode != 0:
                raise SystemExit("llama.cpp's converter failed:\n" + "\n".join(done.stderr.splitlines()[-15:]))
        found.append(target)
    return found[0], found[1]
