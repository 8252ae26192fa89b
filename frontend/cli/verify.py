"""`octavo verify`: recomputes saved answers, and compares tokens and logprobs bit for bit.

Exit codes: 0 if all are equal; 1 if at least one differs; 2 if none differs and at least one cannot be compared, or the
command failed.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.frontend.batch.lines import BatchRequest, BatchResult
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser, configurations
from octavo.frontend.cli.main import fail
from octavo.frontend.cli.run_batch import IN_FLIGHT_PER_SLOT
from octavo.frontend.cli.start_log import start_log
from octavo.frontend.receipts.compare import (
    Outcome,
    Verdict,
    compare_answers,
    compare_choices,
    compare_fingerprints,
    is_aborted,
    num_tokens,
)
from octavo.frontend.receipts.receipt import Receipt
from octavo.frontend.receipts.saved import SavedAnswer, Unusable, read_answers
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import set_default
from octavo.protocol.errors import OctavoError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from octavo.frontend.client import AsyncClient

_DESCRIPTION = """\
Compute answers again that were saved with their receipts, and compare tokens and logprobs bit for bit. Give the flags
of the server that made them. The exit code is 0 if all are equal, 1 if one is different, 2 if one cannot be compared.

FILE is the directory of octavo serve --receipts or one of its files, the results of octavo run-batch
--return-receipts, or {"request": ..., "response": ...} with a response that has a receipt."""


def parser() -> FlagParser:
    """Return the flags of `octavo verify`."""
    parser = config_parser("octavo verify", _DESCRIPTION, operand="FILE")
    parser.add_argument("file", metavar="FILE", help="saved answers")
    return parser


def run(argv: list[str]) -> int:
    """Compare all answers of a file; return the exit code."""
    settings = parser().parse_settings(argv)
    try:
        return _run(Path(settings.pop("file")), settings)
    except OctavoError as error:  # exit code 1 would mean that an answer differs
        return fail(getattr(error, "message", str(error)), getattr(error, "hint", ""), Outcome.INCOMPARABLE)


def _run(path: Path, settings: dict[str, Any]) -> int:
    start_log(str(settings.get("log_level") or "WARNING"), settings.get("log_config_file"))
    engine, server = configurations(settings)
    try:
        is_empty = next(read_answers(path), None) is None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", "name a file, or a directory of receipts") from None
    if is_empty:
        raise CommandError(f"{path} has no answers", "octavo verify --help names what can be compared")
    verification = Verification(path)
    verification.run(engine, server)
    print(verification.render())
    return verification.exit_code


class Verification:
    """The answers of a file, and the results of the comparison with an engine.

    Args:
        path: path of the file or directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = dict.fromkeys(Outcome, 0)
        self._num_tokens = 0
        self._waiting: deque[_Comparison] = deque()
        """Comparisons in the order of the file, from the first that is not printed yet."""
        self._by_number: dict[int, tuple[_Comparison, int]] = {}
        """In-flight requests by number: the comparison that each belongs to, and the index of its prompt."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return next((outcome for outcome in (Outcome.DIFFERENT, Outcome.INCOMPARABLE) if self._counts[outcome]), 0)

    def render(self) -> str:
        """Return a one-line summary."""
        counts = [f"{count} {outcome.name.lower()}" for outcome, count in self._counts.items() if count]
        num_answers = sum(self._counts.values())
        answers = f"{num_answers} answer{'' if num_answers == 1 else 's'}"
        return f"{answers}: {', '.join(counts)}; {self._num_tokens} tokens are equal"

    def run(self, engine: EngineConfig, server: ServerConfig) -> None:
        """Start an engine and compare all answers.

        Raises:
            OctavoError: the engine cannot start, or has died.
        """
        # Imported late because `--help` and completion do not need it.
        import asyncio

        import uvloop

        set_default("TOKENIZERS_PARALLELISM", "false")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(engine, server))

    async def _run(self, engine: EngineConfig, server: ServerConfig) -> None:
        from octavo.frontend.batch.own_engine import serving  # imported late: its imports are slow

        async with serving(engine, server) as (client, app):
            await self.verify(client, app)

    async def verify(self, client: "AsyncClient", app: "ASGIApp") -> None:
        """Compare all answers with those that a running engine computes.

        Args:
            client: the client of the engine.
            app: the server's routes.

        Raises:
            EngineDeadError: the engine died.
        """
        from octavo.frontend.batch.runner import answer_lines, one_by_one

        limit = IN_FLIGHT_PER_SLOT * client.facts.max_num_seqs
        await answer_lines(app, client, one_by_one(self._requests(client)), self._add, limit)

    def _requests(self, client: "AsyncClient") -> Iterator[BatchRequest]:
        """Yield a request for each prompt of each answer that this engine can recompute."""
        number = 0
        for answer in read_answers(self._path):
            comparison = _Comparison(answer.name)
            self._waiting.append(comparison)
            if isinstance(answer, Unusable):
                comparison.verdict = Verdict(Outcome.INCOMPARABLE, answer.reason)
                self._report()
                continue
            comparison.verdict = _incomparable(answer, client)
            if comparison.verdict is not None:
                self._report()
                continue
            bodies = answer.bodies(_adapter_name(answer, client))
            comparison.begin(answer, len(bodies))
            for index, body in enumerate(bodies):
                number += 1
                self._by_number[number] = comparison, index
                yield BatchRequest(number, f"{comparison.name}-{index}", answer.url, body)

    def _add(self, result: BatchResult) -> None:
        comparison, index = self._by_number.pop(result.number)
        comparison.add(index, result)
        self._report()

    def _report(self) -> None:
        while self._waiting and (verdict := self._waiting[0].verdict) is not None:
            comparison = self._waiting.popleft()
            outcome = verdict.outcome.name.lower()
            self._counts[verdict.outcome] += 1
            self._num_tokens += comparison.num_tokens if verdict.outcome is Outcome.EQUAL else 0
            # The text of an answer that differs already names the place.
            text = verdict.text if verdict.outcome is Outcome.DIFFERENT else f"{outcome}: {verdict.text}"
            print(f"{comparison.name}: {text}", flush=True)


class _Comparison:
    """One answer, while its prompts are being computed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.verdict: Verdict | None = None
        self.num_tokens = 0
        self._answer: SavedAnswer | None = None
        self._results: list[BatchResult | None] = []

    def begin(self, answer: SavedAnswer, num_prompts: int) -> None:
        self._answer = answer
        self._results = [None] * num_prompts

    def add(self, index: int, result: BatchResult) -> None:
        self._results[index] = result
        if None not in self._results:
            self.verdict = self._compare([one for one in self._results if one is not None])
            self._results.clear()

    def _compare(self, results: list[BatchResult]) -> Verdict:
        assert self._answer is not None
        recorded, bodies = self._answer.receipt, []
        for result in results:
            if result.error is not None:
                message = result.error.message.partition(": ")[2]  # without the line number
                return Verdict(Outcome.INCOMPARABLE, f"this engine does not answer the request: {message}")
            assert result.response is not None
            bodies.append(msgspec.json.decode(bytes(result.response.body)))
        verdict = compare_answers(recorded, [msgspec.convert(body["receipt"], Receipt).prompts[0] for body in bodies])
        if verdict.outcome is not Outcome.EQUAL:
            return verdict
        if self._answer.choices and not is_aborted(recorded):
            choices = [choice for body in bodies for choice in body["choices"]]
            if (difference := compare_choices(self._answer.choices, choices)) is not None:
                return difference
        self.num_tokens = num_tokens(recorded)
        return Verdict(Outcome.EQUAL, f"{self.num_tokens} tokens{' up to an abort' if is_aborted(recorded) else ''}")


def _incomparable(answer: SavedAnswer, client: "AsyncClient") -> Verdict | None:
    """Return the verdict if the engine cannot reproduce the bits of an answer; `None` if it should be able to."""
    if answer.adapter and _adapter_name(answer, client) is None:
        name, digest = answer.request.get("model"), answer.adapter[:16]
        text = (
            f"the adapter {name!r} with digest {digest}... is not loaded: --enable-lora --lora-modules NAME=DIRECTORY"
        )
        return Verdict(Outcome.INCOMPARABLE, text)
    facts = client.facts
    own = {**facts.identity_parts, "weights": facts.weights_digest, "adapter": answer.adapter}
    own["variant_module"] = facts.variant_module
    recorded = answer.receipt.fingerprint
    difference = compare_fingerprints(
        recorded, {name: value for name, value in own.items() if value or name in recorded}
    )
    return None if difference is None else Verdict(Outcome.INCOMPARABLE, difference)


def _adapter_name(answer: SavedAnswer, client: "AsyncClient") -> str | None:
    """Return this engine's name for the adapter of an answer; `None` if it used none, or the adapter is not loaded."""
    named = client.adapters.named.items()
    return next((name for name, one in named if answer.adapter and one.adapter.digest == answer.adapter), None)
