"""`GrammarCompiler`: compiles grammars in threads, each grammar once for all requests that use it.

Knows no requests. A file descriptor becomes readable when `take_done` has results.
"""

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from octavo.core_proc.grammar.fair_queue import FairQueue
from octavo.core_proc.grammar.sandbox import CompilerSandbox, CpuBudgetExceeded, GrammarRejected, SandboxKilled
from octavo.protocol.events import FailureKind
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher

logger = logging.getLogger(__name__)

NUM_QUICK_THREADS = 2
"""Number of threads that pass a grammar on if it turns out to be costly. One more thread compiles the costly grammars,
so cheap ones never wait for them. Both queues serve frontends in turn."""

QUICK_BUDGET_S = 0.5
"""CPU seconds after which a grammar counts as costly: many times what most grammars need."""

MAX_KEPT = 128
"""Number of compiled grammars in the LRU cache."""

CLOSE_TIMEOUT_S = 1.0

GrammarKey: TypeAlias = tuple[GrammarKind, str, tuple[str, ...]]
"""Identity of a grammar: its kind, its text, and the texts of its parts."""


def grammar_key(spec: GrammarSpec) -> GrammarKey:
    """Return the identity of a grammar."""
    return (spec.kind, spec.text, tuple([part.text for part in spec.parts]))


Jobs: TypeAlias = FairQueue[GrammarKey, bytes]
"""Grammars to compile, by frontend."""


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """Why a grammar could not be compiled."""

    kind: FailureKind
    message: str
    part: int | None = None
    """Index of the invalid part. None if unknown."""


class GrammarCompiler:
    """Compiler threads, started with the first grammar, and a cache of their results.

    Call all public methods from one thread.

    Args:
        timeout_s: limit of CPU seconds for one grammar.
    """

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `take_done` has results."""
        self._vocabulary: ModelVocabulary | None = None
        self._tokens: GrammarTokens | None = None
        self._tokens_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._quick: Jobs = FairQueue()
        self._costly: Jobs = FairQueue()
        self._pending: dict[GrammarKey, tuple[bytes, ...]] = {}
        """Grammars that are being compiled, with the frontends that wait for them."""
        self._kept: OrderedDict[GrammarKey, Matcher] = OrderedDict()
        self._done: deque[tuple[GrammarKey, Matcher | CompileFailure]] = deque()

    @property
    def vocabulary(self) -> ModelVocabulary | None:
        """The vocabulary for which grammars are compiled. None until a frontend has sent it."""
        return self._vocabulary

    def set_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Set the vocabulary. Later calls are ignored."""
        self._vocabulary = self._vocabulary or vocabulary

    def find(self, spec: GrammarSpec) -> "Matcher | None":
        """Return a new matcher of a cached grammar. Return None if it is not cached."""
        key = grammar_key(spec)
        if (matcher := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        return matcher.copy()

    def start(self, spec: GrammarSpec, client: bytes) -> GrammarKey:
        """Start to compile a grammar for a frontend. Return the key under which `take_done` returns it. Needs a
        vocabulary."""
        key = grammar_key(spec)
        if key in self._pending:
            if client not in self._pending[key]:
                self._pending[key] = (*self._pending[key], client)
                for queue in (self._quick, self._costly):
                    queue.join(key, client)
        else:
            self._pending[key] = (client,)
            if not self._threads:
                queues = [*[(self._quick, QUICK_BUDGET_S)] * NUM_QUICK_THREADS, (self._costly, None)]
                self._threads = [
                    threading.Thread(target=self._work, args=queue, name="octavo grammars", daemon=True)
                    for queue in queues
                ]
                for thread in self._threads:
                    thread.start()
            self._quick.put(key, [client])
        return key

    def drop(self, key: GrammarKey) -> None:
        """Cancel a grammar that no request waits for. A compilation in progress continues."""
        self._pending.pop(key, None)

    def take_done(self) -> "list[tuple[GrammarKey, Matcher | CompileFailure]]":
        """Return the results since the last call."""
        if not self._threads:
            return []
        with contextlib.suppress(BlockingIOError):  # no results
            os.eventfd_read(self.wake_fd)
        done = []
        while self._done:
            key, result = self._done.popleft()
            self._pending.pop(key, None)
            if not isinstance(result, CompileFailure):
                self._keep(key, result)
            done.append((key, result))
        return done

    def close(self) -> None:
        """Stop the threads and their sandboxes.

        Blocks until: they have stopped, or `CLOSE_TIMEOUT_S` has passed. A thread that still compiles ends with the
        process.
        """
        self._quick.close()
        self._costly.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.wake_fd)

    def _keep(self, key: GrammarKey, matcher: "Matcher") -> None:
        self._kept[key] = matcher
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _work(self, jobs: Jobs, cpu_budget_s: float | None) -> None:
        """Compile grammars one after another: the body of a thread. Grammars above the budget move to the costly
        queue."""
        sandbox = CompilerSandbox(self._timeout_s)
        try:
            while (key := jobs.get()) is not None:
                if key not in self._pending:
                    continue
                result: Matcher | CompileFailure | None = CompileFailure(
                    FailureKind.INTERNAL, "the grammar compiler has failed"
                )
                try:
                    result = self._compile(sandbox, key, cpu_budget_s)
                except CpuBudgetExceeded:
                    result = None
                    self._costly.put(key, self._pending.get(key, ()))
                    sandbox.warm_up()
                except Exception:  # the thread must continue with the next grammar after any error
                    logger.exception("the grammar compiler has failed; the request gets an internal error")
                    sandbox.close()
                finally:  # requests wait for this result in any case
                    if result is not None:
                        self._done.append((key, result))
                        os.eventfd_write(self.wake_fd, 1)
        finally:
            sandbox.close()

    def _compile(
        self, sandbox: CompilerSandbox, key: GrammarKey, cpu_budget_s: float | None
    ) -> "Matcher | CompileFailure":
        sandbox.warm_up()
        # Imported here because it is slow, see `matcher.py`.
        from octavo.core_proc.grammar.matcher import GrammarFault, Matcher, source_of

        kind, text, parts = key
        start = time.perf_counter()
        try:
            source = source_of(GrammarSpec(kind, text))
            sandbox.check(source, cpu_budget_s)
            matcher = Matcher.compile(self._grammar_tokens(), source)
        except GrammarFault as error:
            return CompileFailure(FailureKind.INVALID, str(error))
        except GrammarRejected as error:
            try:
                failure = self._find_fault(sandbox, parts, cpu_budget_s)
            except SandboxKilled:
                failure = None
            return failure or CompileFailure(FailureKind.INVALID, str(error))
        except SandboxKilled as error:
            return CompileFailure(FailureKind.INTERNAL, str(error))
        logger.debug("compiled a grammar of %d characters in %.3f s", len(text), time.perf_counter() - start)
        return matcher

    def _find_fault(
        self, sandbox: CompilerSandbox, parts: Sequence[str], cpu_budget_s: float | None
    ) -> CompileFailure | None:
        """Return the error of the first part that is invalid by itself. Return None if there is none.

        The search ends after the time limit of one grammar. The budget is for all parts together.

        Raises:
            CpuBudgetExceeded: the parts need more than `cpu_budget_s`.
            SandboxKilled: see `CompilerSandbox.check`.
        """
        from octavo.core_proc.grammar.matcher import source_of

        used_s = 0.0
        for index, text in enumerate(parts):
            try:
                used_s += sandbox.check(source_of(GrammarSpec(GrammarKind.JSON_SCHEMA, text)), cpu_budget_s)
            except GrammarRejected as error:
                return CompileFailure(FailureKind.INVALID, str(error), index)
            if cpu_budget_s is not None and used_s > cpu_budget_s:
                raise CpuBudgetExceeded
            if used_s > self._timeout_s:
                break
        return None

    def _grammar_tokens(self) -> "GrammarTokens":
        from octavo.core_proc.grammar.matcher import GrammarTokens

        with self._tokens_lock:
            if self._tokens is None:
                assert self._vocabulary is not None, "a frontend sends its vocabulary before its first grammar"
                self._tokens = GrammarTokens(self._vocabulary.tokens, self._vocabulary.special_token_ids)
            return self._tokens
