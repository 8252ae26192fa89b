"""Grammars that are compiled for a scheduler, for the tests of structured output in the core.

The imports are in the fixtures because most tests of this folder need none of them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from grammar_desk import Desk

    from octavo.core_proc.grammar.compiler import GrammarCompiler


@pytest.fixture(scope="module")
def compiler() -> "Iterator[GrammarCompiler]":
    from grammar_desk import VOCABULARY

    from octavo.core_proc.grammar.compiler import GrammarCompiler

    compiler = GrammarCompiler(timeout_s=5)
    compiler.set_vocabulary(VOCABULARY)
    yield compiler
    compiler.close()


@pytest.fixture
def desk(compiler: "GrammarCompiler") -> "Desk":
    from grammar_desk import Desk

    return Desk(compiler)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the grammars that are compiled during the test."""
    from octavo.core_proc.grammar.compiler import GrammarCompiler

    texts: list[str] = []
    compile_ = GrammarCompiler._compile

    def noted(self: GrammarCompiler, sandbox: Any, key: Any, cpu_budget_s: float | None) -> Any:
        texts.append(key[1])
        return compile_(self, sandbox, key, cpu_budget_s)

    monkeypatch.setattr(GrammarCompiler, "_compile", noted)
    return texts
