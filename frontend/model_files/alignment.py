"""Finds the cross-attention heads of a checkpoint that follow the audio, and so tell when a token is spoken."""

from pathlib import Path

from octavo.frontend.model_files.json_file import read_json


def alignment_heads(home: Path) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) pairs from `generation_config.json`.

    Empty if it names none, or if the decoder does not have all of them, as in distilled models with their teacher's
    file.

    Args:
        home: directory of the checkpoint.

    Raises:
        ConfigError: a file does not hold a JSON object.
    """
    found, sizes = (read_json(home / name) for name in ("generation_config.json", "config.json"))
    heads = tuple(tuple(pair) if isinstance(pair, list) else () for pair in found.get("alignment_heads") or ())
    num_layers, num_heads = sizes.get("decoder_layers", 0), sizes.get("decoder_attention_heads", 0)
    are_there = [len(pair) == 2 and pair[0] in range(num_layers) and pair[1] in range(num_heads) for pair in heads]
    return heads if all(are_there) else ()
