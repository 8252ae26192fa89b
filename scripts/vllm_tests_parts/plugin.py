"""A pytest plugin for vLLM's tests: `vllm` is octavo.compat.vllm, and `tests.utils` starts octavo.

Parts of vLLM that octavo lacks are placeholders: a test that uses one is skipped, and the others in its file run.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self

import pytest

from octavo.compat.vllm.importer import VllmFinder, member
from octavo.compat.vllm.names import NAMES
from vllm_tests_parts import LEFT_OUT, remote_server

PLUGIN_TYPES = "octavo.frontend.plugins.vllm_types"
"""Module with the request types that parser plugins see; vLLM's tests need its own classes."""


class _PlaceholderType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"tests vLLM's own {cls.__name__}")


def _placeholder(name: str) -> Any:
    return _PlaceholderType(name, (), {})


class PlaceholderFinder(VllmFinder):
    """Finds every module below `vllm`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `VllmFinder`."""
        if fullname != "vllm" and not fullname.startswith("vllm."):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """See `VllmFinder`."""

        def get(name: str) -> Any:
            home, _ = NAMES.get(module.__name__, {}).get(name, ("", ""))
            if home == PLUGIN_TYPES:
                return _placeholder(f"{module.__name__}.{name}")
            try:
                return member(module.__name__, module.__name__, name)
            except AttributeError:
                if name.startswith("__"):
                    raise
                return _placeholder(f"{module.__name__}.{name}")

        module.__getattr__ = get  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests by their full names; a name without parameters matches all of them."""
    names = {f"tests/entrypoints/{name}" for name in os.environ.get(LEFT_OUT, "").splitlines()}
    left_out = [item for item in items if not names.isdisjoint((item.nodeid, item.nodeid.partition("[")[0]))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


class OfflineRunner:
    """The class that `vllm_runner` returns: an `LLM`, until the context ends.

    Args:
        model: directory or name in the hub's cache.
        settings: settings of the engine.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._model, self._settings = model, settings

    def __enter__(self) -> Self:
        from octavo.compat.vllm import LLM

        self.llm = LLM(model=self._model, hf_overrides=remote_server.STAND_IN, **self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


@pytest.fixture(scope="session")
def vllm_runner() -> type[OfflineRunner]:
    """Return the class that starts an engine for a test."""
    return OfflineRunner


class EmbeddingRunner:
    """The class that `hf_runner` returns, as far as tests of prompt embeddings use it: tokenizer and embeddings.

    Args:
        model: name in the hub's cache.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_prompt_embeddings(self, prompts: Sequence[str]) -> list[Any]:
        """Return a tensor [tokens, hidden size] for each prompt."""
        embed = self.model.get_input_embeddings()
        return [embed(self.tokenizer(text, return_tensors="pt").input_ids)[0].detach() for text in prompts]

    def wrap_device(self, tensors: Any) -> Any:
        """Return the tensors: all of them are on the CPU."""
        return tensors


@pytest.fixture(scope="session")
def hf_runner() -> type[EmbeddingRunner]:
    """Return the class that loads a model for a test."""
    return EmbeddingRunner


def _placeholders(name: str) -> ModuleType:
    module = ModuleType(name)

    def get(member: str) -> Any:
        if member.startswith("__"):
            raise AttributeError(member)
        return _placeholder(f"{name}.{member}")

    module.__getattr__ = get  # type: ignore[method-assign]
    return module


sys.meta_path.insert(0, PlaceholderFinder("vllm"))
sys.modules["tests.utils"] = remote_server
for _name in ("tests.conftest", "tests.entrypoints.openai.chat_completion.test_serving_chat"):
    sys.modules[_name] = _placeholders(_name)
