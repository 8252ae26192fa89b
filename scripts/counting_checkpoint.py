"""Makes a checkpoint of a published shape that counts: the token after i is i + 1, whatever precedes it.

Random weights generate text that repeats nothing of a prompt, so no draft from the prompt would be accepted. Here all
layers are computed at their full cost and add zeros: `o_proj` and `down_proj` are 0. Row i + 1 of `lm_head` is the
embedding of i.
"""

import json
from pathlib import Path

import torch
from make_bf16_checkpoint import make
from safetensors.torch import load_file, save_file


def make_counting(shape: str) -> Path:
    """Return the directory of such a checkpoint, from octavo's cache if it is complete there.

    Blocks for some seconds if it has to be made.
    """
    source = make(shape).directory
    target = source.with_name(f"{shape}-counting-bf16")
    if not (target / "config.json").exists():
        weights = load_file(source / "model.safetensors")
        for name, values in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values.zero_()
        weights["lm_head.weight"] = torch.roll(weights["model.embed_tokens.weight"], 1, dims=0)
        target.mkdir(exist_ok=True)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
        for path in source.iterdir():
            if path.name not in ("model.safetensors", "config.json"):
                (target / path.name).write_bytes(path.read_bytes())
        # Last: the checkpoint is complete once this file is there.
        (target / "config.json").write_text(json.dumps(config))
    return target
