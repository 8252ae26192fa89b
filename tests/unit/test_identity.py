"""Engines of one identity give the same bits: what the identity depends on, and what not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_client import resolved_config

from octavo.protocol.config import DeviceFacts, ModelFacts
from octavo.protocol.identity import MAX_PAGES, PAGE_BYTES, identity_of, identity_parts, weights_digest


def model_at(path: Path, **changes: Any) -> ModelFacts:
    given = {"model_path": str(path), "load_format": "safetensors", **changes}
    return msgspec.structs.replace(resolved_config().model, **given)


def write(directory: Path, *files: bytes) -> Path:
    directory.mkdir()
    for number, data in enumerate(files):
        (directory / f"model-{number}.safetensors").write_bytes(data)
    return directory


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    one = weights_digest(model_at(write(tmp_path / "a", b"abc" * 5000, b"x")))
    assert one == weights_digest(model_at(write(tmp_path / "b", b"abc" * 5000, b"x"))), "wherever and whenever written"
    changed = [(b"abc" * 4999 + b"abd", b"x"), (b"abc" * 5000, b"y"), (b"x", b"abc" * 5000), (b"abc" * 5000,)]
    digests = {weights_digest(model_at(write(tmp_path / str(n), *files))) for n, files in enumerate(changed)}
    assert len(digests | {one}) == 5


def test_of_a_large_checkpoint_equally_distant_pages_are_read(tmp_path: Path) -> None:
    size = 3 * MAX_PAGES * PAGE_BYTES
    files = {}
    for name, start in {"same": 0, "piece": size // 2}.items():
        path = tmp_path / f"{name}.gguf"
        with path.open("wb") as file:
            file.truncate(size)
            if start:
                file.seek(start)
                file.write(b"1" * (size // MAX_PAGES))
        files[name] = weights_digest(model_at(path, load_format="gguf"))
    (tmp_path / "same.gguf").rename(tmp_path / "other.gguf")
    assert weights_digest(model_at(tmp_path / "other.gguf", load_format="gguf")) == files["same"]
    assert files["piece"] != files["same"]


def test_missing_files_are_an_error_and_random_weights_have_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        weights_digest(model_at(tmp_path / "nothing"))
    assert weights_digest(model_at(tmp_path / "nothing", load_format="dummy")) == ""


def worker(device_name: str = "a CPU, 2 threads", cpu_kernels: str = "native avx2") -> list[DeviceFacts]:
    sizes = {"total_bytes": 0, "free_bytes": 0, "weights_bytes": 0, "activation_bytes": 0, "cache_groups": []}
    return [msgspec.convert({"rank": 0, "device_name": device_name, "cpu_kernels": cpu_kernels, **sizes}, DeviceFacts)]


def test_the_identity_depends_on_what_bits_depend_on() -> None:
    config = resolved_config(dtype="float32")
    base = identity_of(config, "w", worker())
    others = [
        identity_of(config, "v", worker()),
        identity_of(msgspec.structs.replace(config, device="cuda"), "w", worker("a GPU", "")),
        identity_of(msgspec.structs.replace(config, device="cuda"), "w", worker("another GPU", "")),
        identity_of(resolved_config(dtype="bfloat16"), "w", worker()),
        identity_of(resolved_config(dtype="float32", kv_cache_dtype="int8"), "w", worker()),
        identity_of(resolved_config(dtype="float32", cpu_kernels="torch"), "w", worker()),
        identity_of(config, "w", worker(cpu_kernels="native avx512")),  # a library that was built for it
        identity_of(config, "w", worker(cpu_kernels="torch 2.13")),  # no compiler was found
    ]
    assert len({base, *others}) == 9
    same = resolved_config(dtype="float32", max_num_seqs=3, num_threads=1)
    assert identity_of(same, "w", worker("another CPU, 1 thread")) == base


def test_the_parts_of_an_identity_name_what_differs() -> None:
    one, other = resolved_config(dtype="float32"), resolved_config(dtype="bfloat16", max_num_seqs=3)
    parts = identity_parts(one, worker()), identity_parts(other, worker(cpu_kernels="native avx512"))
    differing = {name for name in parts[0].keys() | parts[1].keys() if parts[0].get(name) != parts[1].get(name)}
    assert differing - {"kv_cache_dtype"} == {"dtype", "kernel_level"}
    assert (parts[0]["dtype"], parts[1]["kernel_level"]) == ("float32", "native avx512")
