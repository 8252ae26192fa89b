"""A tiny model, and engines that the tests of several files share: one of each kind per test process.

Tests that kill, stall or fill an engine start one of their own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, serve
from tiny_models import make_tiny

from octavo import LLM
from octavo.kernels.native import library
from octavo.kernels.native.library import NativeLibrary


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny Llama. Tests must not change it."""
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[LLM]:
    """Return an `LLM` of the tiny model."""
    with LLM(str(model), dtype="float32", max_model_len=512, max_num_seqs=16, max_logprobs=-1) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    """Return a server of the tiny model that parses tool calls."""
    flags = ("--dtype", "float32", "--cpu-kernels", "torch", "--max-model-len", "1024", "--seed", "3")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-request-chat-template")
    with serve(model, *flags, *tools, "--served-model-name", "tiny") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> NativeLibrary | None:
    """Return what models compute with: the library, or None for torch."""
    return library.load() if request.param == "native" else None
