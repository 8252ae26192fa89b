"""Packed weights on disk: a second load gives the same bits without the checkpoint, and damaged files are rejected."""

import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from safetensors.numpy import load_file
from specs import PYTHONPATH
from tiny_models import ARCHITECTURES, make_tiny
from worker_plans import worker_config

from octavo.kernels.linear import packing
from octavo.kernels.native import library as native
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights import load as loading
from octavo.worker_proc.weights import packed_cache, packed_file
from octavo.worker_proc.weights.load import load_model
from octavo.worker_proc.weights.packed_cache import PackedCache


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return native.load()


@pytest.fixture(autouse=True)
def small_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MIN_KEPT_BYTES", 0)


@pytest.fixture
def config(tmp_path: Path) -> ResolvedConfig:
    return worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), dtype="bfloat16")


def load(config: ResolvedConfig, library: NativeLibrary, cache_dir: Path | None) -> Model:
    return load_model(config, lambda fraction: None, library=library, cache_dir=cache_dir)


def content(model: Model) -> dict[str, bytes]:
    """Return every byte that a model computes with."""
    found = {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in model.parameters.tensors.items()}
    for name, packed in model.parameters.packed.items():
        header, buffers = packed.product.packed.to_buffers()
        found[name] = json.dumps(header).encode() + b"".join(bytes(buffer.numpy()) for buffer in buffers.values())
    return found


def file_of(config: ResolvedConfig, library: NativeLibrary, cache_dir: Path) -> Path:
    cache = PackedCache.of(config, library, cache_dir)
    assert cache is not None
    return cache.path


@pytest.fixture
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on no checkpoint can be read."""

    def fail(*_: object) -> None:
        raise AssertionError("the checkpoint was read")

    return lambda: monkeypatch.setattr(loading, "read_text_weights", fail)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_second_load_has_the_same_bits_without_the_checkpoint(
    arch: str, dtype: str, tmp_path: Path, library: NativeLibrary, no_checkpoint: Callable[[], None]
) -> None:
    config = worker_config(make_tiny(arch, tmp_path / "model"), dtype=dtype)
    expected = content(load(config, library, None))
    first = content(load(config, library, tmp_path))
    no_checkpoint()
    second = load(config, library, tmp_path)
    assert expected == first == content(second)
    assert len(expected) > 10
    assert second.weights_bytes == load_bytes(second)


def load_bytes(model: Model) -> int:
    tensors = sum(tensor.nbytes for tensor in model.parameters.tensors.values())
    return tensors + sum(packed.product.packed.num_bytes for packed in model.parameters.packed.values())


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1])
def test_quantized_weights_are_kept_too(
    kind: Type, tmp_path: Path, library: NativeLibrary, no_checkpoint: Callable[[], None]
) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model", hidden_size=96)
    tensors = load_file(model / "model.safetensors")
    file = write_gguf(tmp_path / "model.gguf", "llama", tensors, num_heads=6, num_kv_heads=2, kind=kind)
    base = worker_config(model, dtype="bfloat16")
    facts = msgspec.structs.replace(base.model, load_format="gguf", model_path=str(file))
    config = msgspec.structs.replace(base, model=facts, quantization="gguf")
    first = load(config, library, tmp_path)
    assert {packed.product.packed.kind for packed in first.parameters.packed.values()} == {
        "u8" if kind is Type.Q8_0 else "u4"
    }
    no_checkpoint()
    assert content(load(config, library, tmp_path)) == content(first)


def test_weights_in_12_bits_are_kept_too(
    config: ResolvedConfig,
    tmp_path: Path,
    library: NativeLibrary,
    no_checkpoint: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "MIN_CODED_WEIGHTS", 1)
    monkeypatch.setattr(packing, "UNPACKING_LEVELS", {library.isa})
    first = load(config, library, tmp_path)
    assert {packed.product.packed.kind for packed in first.parameters.packed.values()} == {"bf16_12"}
    no_checkpoint()
    second = load(config, library, tmp_path)
    assert content(second) == content(first)
    assert second.weights_bytes == load_bytes(second)


def test_all_that_changes_the_weights_changes_the_place(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary
) -> None:
    def place(changed: ResolvedConfig, used: NativeLibrary = library) -> Path:
        return file_of(changed, used, tmp_path)

    replace = msgspec.structs.replace
    other_model = replace(config.model, hf_config={**config.model.hf_config, "rms_norm_eps": 0.5})
    other_library = SimpleNamespace(path=Path("/elsewhere/other.so"))
    places = [
        place(config),
        place(replace(config, dtype="float32")),
        place(replace(config, quantization="int8")),
        place(replace(config, model=other_model)),
        place(config, other_library),
    ]
    weights = Path(config.model.model_path) / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    places.append(place(config))
    assert len(set(places)) == len(places)
    same_weights = replace(config.model, tokenizer_path="/elsewhere", eos_token_ids=[7])
    assert place(replace(config, max_num_seqs=3, block_size=4, model=same_weights)) == places[-1]


def test_what_is_not_kept(config: ResolvedConfig, tmp_path: Path, library: NativeLibrary) -> None:
    dummy = msgspec.structs.replace(config.model, load_format="dummy")
    assert PackedCache.of(msgspec.structs.replace(config, model=dummy), library, tmp_path) is None
    assert PackedCache.of(msgspec.structs.replace(config, packed_weights_cache_bytes=0), library, tmp_path) is None
    assert PackedCache.of(config, None, tmp_path) is None


def test_small_models_are_not_kept(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    load(config, library, tmp_path)
    assert not (tmp_path / packed_cache.FOLDER).exists()


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cut short"),
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: data + bytes(1), "has grown"),
        (lambda data: data[:10], "is not a file of packed weights"),
        (lambda data: b"", "is not a file of packed weights"),
        (lambda data: b"another!" + data[8:], "is not a file of packed weights"),
        (lambda data: flip(data, 9), "header is damaged"),
        (lambda data: flip(data, 100), "header is damaged"),
    ],
)
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes],
    message: str,
    config: ResolvedConfig,
    tmp_path: Path,
    library: NativeLibrary,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = content(load(config, library, tmp_path))
    path = file_of(config, library, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert content(load(config, library, tmp_path)) == expected
    assert message in caplog.text
    assert path.read_bytes() == whole


def test_the_file_of_another_model_is_not_believed(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    other = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "other", seed=1), dtype="bfloat16")
    load(other, library, tmp_path)
    expected = content(load(config, library, None))
    path = file_of(config, library, tmp_path)
    path.write_bytes(file_of(other, library, tmp_path).read_bytes())
    assert content(load(config, library, tmp_path)) == expected
    assert "made for another model" in caplog.text


def test_the_right_key_on_the_wrong_weights_is_not_believed(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    load(config, library, tmp_path)
    cache = PackedCache.of(config, library, tmp_path)
    assert cache is not None
    items = packed_file.read(cache.path, cache.key)
    items["norm.weight"].fields["shape"] = [2, 24]
    packed_file.write(cache.path, cache.key, items)
    load(config, library, tmp_path)
    assert "weights of another model" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert content(load(config, library, tmp_path / "file")) == content(load(config, library, None))
    assert "cannot be kept for the next start" in caplog.text


def test_a_full_disk_is_a_warning_and_leaves_nothing(
    config: ResolvedConfig,
    tmp_path: Path,
    library: NativeLibrary,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed_file.os, "fsync", full)
        load(config, library, tmp_path)
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / packed_cache.FOLDER).iterdir())
    nearly = SimpleNamespace(free=1000)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: nearly)
    load(config, library, tmp_path)
    assert "over half of the free space" in caplog.text
    assert not list((tmp_path / packed_cache.FOLDER).iterdir())


def test_old_files_give_way_to_new_ones(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    load(config, library, tmp_path)
    size = file_of(config, library, tmp_path).stat().st_size
    folder = tmp_path / packed_cache.FOLDER
    now = time.time()
    for name, age_s in [("ancient", 2 * packed_cache.UNUSED_AFTER_S), ("a", 300), ("b", 200), ("c", 100)]:
        (folder / f"{name}{packed_cache.SUFFIX}").write_bytes(bytes(size))
        os.utime(folder / f"{name}{packed_cache.SUFFIX}", (now - age_s, now - age_s))
    for name, age_s in [("abandoned", 2 * packed_cache.ABANDONED_AFTER_S), ("growing", 10)]:
        (folder / f"{name}{packed_file.TEMPORARY_SUFFIX}").touch()
        os.utime(folder / f"{name}{packed_file.TEMPORARY_SUFFIX}", (now - age_s, now - age_s))
    other = msgspec.structs.replace(config, dtype="float16", packed_weights_cache_bytes=3 * size)
    load(other, library, tmp_path)
    left = {path.name for path in folder.iterdir()}
    kept = {file_of(config, library, tmp_path).name, file_of(other, library, tmp_path).name}
    assert left == kept | {f"c{packed_cache.SUFFIX}", f"growing{packed_file.TEMPORARY_SUFFIX}"}
    os.utime(folder / f"c{packed_cache.SUFFIX}", (0, 0))
    roomy = msgspec.structs.replace(config, quantization="int8")
    load(roomy, library, tmp_path)
    left = {path.name for path in folder.iterdir()} - {file_of(roomy, library, tmp_path).name}
    assert left == kept | {f"growing{packed_file.TEMPORARY_SUFFIX}"}
    left = {path.name for path in folder.iterdir()}
    tiny = msgspec.structs.replace(config, dtype="float32", packed_weights_cache_bytes=1000)
    load(tiny, library, tmp_path)
    assert "--packed-weights-cache-bytes 1000" in caplog.text
    assert {path.name for path in folder.iterdir()} == left


_STARTING = """
import hashlib, sys
from pathlib import Path
import torch
from worker_plans import worker_config
from octavo.kernels.native import library
from octavo.worker_proc.weights import packed_cache
from octavo.worker_proc.weights.load import load_model
packed_cache.MIN_KEPT_BYTES = 0
model = load_model(worker_config(sys.argv[1], dtype="bfloat16"), lambda fraction: None,
                   library=library.load(), cache_dir=Path(sys.argv[2]))
digest = hashlib.sha256()
for name, packed in sorted(model.parameters.packed.items()):
    for buffer in packed.product.packed.to_buffers()[1].values():
        digest.update(bytes(buffer.numpy()))
print(digest.hexdigest())
"""


def test_concurrent_first_starts_write_the_weights_once(
    config: ResolvedConfig, tmp_path: Path, library: NativeLibrary
) -> None:
    command = [sys.executable, "-c", _STARTING, config.model.model_path, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    starts = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) for _ in range(3)
    ]
    said = {start.communicate(timeout=120)[0] for start in starts}
    assert len(said) == 1
    assert len(said.pop()) == 65
    assert [path.suffix for path in (tmp_path / packed_cache.FOLDER).iterdir()] == [packed_cache.SUFFIX]


@pytest.mark.model
def test_the_default_model_is_mapped_without_its_checkpoint(
    smollm2_gguf: Path, tmp_path: Path, library: NativeLibrary, no_checkpoint: Callable[[], None]
) -> None:
    config = worker_config(smollm2_gguf, dtype="bfloat16")
    assert config.quantization == "gguf"
    first = content(load(config, library, tmp_path))
    no_checkpoint()
    model = load(config, library, tmp_path)
    assert content(model) == first
    sizes = gguf.GGUFReader(smollm2_gguf).tensors
    assert model.weights_bytes < sum(tensor.n_bytes for tensor in sizes) + 2 * 49152 * 576 + 2**22
