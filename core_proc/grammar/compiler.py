"""Grammars compiled on threads, each grammar once for all who ask for it.

Knows no requests: what is done is fetched with `take_done`, and a file descriptor says when there is something.
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

from octavo.core_proc.grammar.lane import Lane
from octavo.core_proc.grammar.trial import Trial, TrialFailed, TrialKilled, TrialUnfinished
from octavo.protocol.events import FailureKind
from octavo.protocol.requests import Vocabulary
from octavo.protocol.structured import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher

logger = logging.getLogger(__name__)

NUM_QUICK_THREADS = 2
"""Threads that leave a grammar when it turns out to be costly. One further thread compiles those, one after another, so
however many costly ones there are, others wait for none of them. Either kind serves the frontends in turn."""

PATIENCE_S = 0.5
"""Processor time after which a grammar counts as costly: many times what most take."""

MAX_KEPT = 128
"""Compiled grammars kept for requests to come, the latest used."""

CLOSE_TIMEOUT_S = 1.0

GrammarKey: TypeAlias = tuple[GrammarKind, str, tuple[str, ...]]
"""What makes a grammar the same one: its kind and text, and the texts of its parts."""


def grammar_key(spec: GrammarSpec) -> GrammarKey:
    """Return what makes this grammar the same as another."""
    return (spec.kind, spec.text, tuple([part.text for part in spec.parts]))


Jobs: TypeAlias = Lane[GrammarKey, bytes]
"""Grammars to compile, by the frontends that wait for them."""


@dataclass(frozen=True, slots=True)
class NoGrammar:
    """Why a grammar could not be compiled."""

    kind: FailureKind
    message: str
    part: int | None = None
    """The part of the grammar that is to blame; None: nobody knows of one."""


class GrammarCompiler:
    """Threads, started when the first grammar comes, and what they have made.

    Call everything but the threads' own methods from one thread.

    Args:
        timeout_s: processor time that one grammar may take.
    """

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `take_done` has something."""
        self._vocabulary: Vocabulary | None = None
        self._tokens: GrammarTokens | None = None
        self._tokens_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._quick: Jobs = Lane()
        self._costly: Jobs = Lane()
        self._pending: dict[GrammarKey, tuple[bytes, ...]] = {}
        """What somebody waits for, and the frontends that have asked for it."""
        self._kept: OrderedDict[GrammarKey, Matcher] = OrderedDict()
        self._done: deque[tuple[GrammarKey, Matcher | NoGrammar]] = deque()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What grammars are compiled for; None until a frontend has told."""
        return self._vocabulary

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the vocabulary; the first one stays."""
        self._vocabulary = self._vocabulary or vocabulary

    def find(self, spec: GrammarSpec) -> "Matcher | None":
        """Return a new matcher of a grammar that is compiled already."""
        key = grammar_key(spec)
        if (matcher := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        return matcher.copy()

    def start(self, spec: GrammarSpec, client: bytes) -> GrammarKey:
        """Have a grammar compiled for a frontend, and return its name in `take_done`. Needs a vocabulary."""
        key = grammar_key(spec)
        if key in self._pending:
            if client not in self._pending[key]:
                self._pending[key] = (*self._pending[key], client)
                for lane in (self._quick, self._costly):
                    lane.join(key, client)
        else:
            self._pending[key] = (client,)
            if not self._threads:
                lanes = [*[(self._quick, PATIENCE_S)] * NUM_QUICK_THREADS, (self._costly, None)]
                self._threads = [
                    threading.Thread(target=self._work, args=lane, name="octavo grammars", daemon=True)
                    for lane in lanes
                ]
                for thread in self._threads:
                    thread.start()
            self._quick.put(key, [client])
        return key

    def drop(self, key: GrammarKey) -> None:
        """Note that nobody waits for a grammar any more: it is not compiled, unless that has begun."""
        self._pending.pop(key, None)

    def take_done(self) -> "list[tuple[GrammarKey, Matcher | NoGrammar]]":
        """Return what has been compiled since the last call, or could not be."""
        if not self._threads:
            return []
        with contextlib.suppress(BlockingIOError):  # nothing is new
            os.eventfd_read(self.wake_fd)
        done = []
        while self._done:
            key, result = self._done.popleft()
            self._pending.pop(key, None)
            if not isinstance(result, NoGrammar):
                self._keep(key, result)
            done.append((key, result))
        return done

    def close(self) -> None:
        """End the threads, and the processes that they have.

        Blocks until: they have ended, or `CLOSE_TIMEOUT_S` has passed; one that still compiles ends with this process.
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

    def _work(self, jobs: Jobs, patience_s: float | None) -> None:
        """Compile one grammar after another: the body of a thread. What takes more patience goes to the costly ones."""
        trial = Trial(self._timeout_s)
        try:
            while (key := jobs.get()) is not None:
                if key not in self._pending:
                    continue
                result: Matcher | NoGrammar | None = NoGrammar(
                    FailureKind.INTERNAL, "the compiler of grammars has failed"
                )
                try:
                    result = self._compile(trial, key, patience_s)
                except TrialUnfinished:
                    result = None
                    self._costly.put(key, self._pending.get(key, ()))
                    trial.warm_up()
                except Exception:  # the boundary of a thread: others wait for what comes after this one
                    logger.exception("the compiler of grammars has failed")
                    trial.close()
                finally:  # whatever happened, somebody waits for it
                    if result is not None:
                        self._done.append((key, result))
                        os.eventfd_write(self.wake_fd, 1)
        finally:
            trial.close()

    def _compile(self, trial: Trial, key: GrammarKey, patience_s: float | None) -> "Matcher | NoGrammar":
        trial.warm_up()
        # Here and not above: see the module.
        from octavo.core_proc.grammar.matcher import GrammarFault, Matcher, source_of

        kind, text, parts = key
        start = time.perf_counter()
        try:
            source = source_of(GrammarSpec(kind, text))
            trial.check(source, patience_s)
            matcher = Matcher.compile(self._grammar_tokens(), source)
        except GrammarFault as error:
            return NoGrammar(FailureKind.INVALID, str(error))
        except TrialFailed as error:
            try:
                blame = self._find_fault(trial, parts, patience_s)
            except TrialKilled:
                blame = None
            return blame or NoGrammar(FailureKind.INVALID, str(error))
        except TrialKilled as error:
            return NoGrammar(FailureKind.INTERNAL, str(error))
        logger.debug("compiled a grammar of %d characters in %.3f s", len(text), time.perf_counter() - start)
        return matcher

    def _find_fault(self, trial: Trial, parts: Sequence[str], patience_s: float | None) -> NoGrammar | None:
        """Return what is wrong with the first part that is no grammar by itself, None if nothing is.

        After the time that one grammar may take no further part is tried. All of them together need the patience.

        Raises:
            TrialUnfinished: they take longer than `patience_s`.
            TrialKilled: as `Trial.check` does.
        """
        from octavo.core_proc.grammar.matcher import source_of

        used_s = 0.0
        for index, text in enumerate(parts):
            try:
                used_s += trial.check(source_of(GrammarSpec(GrammarKind.JSON_SCHEMA, text)), patience_s)
            except TrialFailed as error:
                return NoGrammar(FailureKind.INVALID, str(error), index)
            if patience_s is not None and used_s > patience_s:
                raise TrialUnfinished
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
