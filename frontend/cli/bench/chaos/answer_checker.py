"""`AnswerChecker`: compares the answers of the disturbed engine with those of an undisturbed engine.

Sends no requests and handles no processes.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.frontend.cli.bench.chaos.answers import Answer, is_beginning
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, ChaosOutcome, Result

BREAK_WITHIN_S = 10.0
"""Seconds that clients may take to notice that their HTTP process was killed."""

MAX_RETRIES = 20

MAX_FINDINGS = 50
"""Number of findings that are kept; further ones are only counted."""


class AnswerChecker:
    """Checks every result of a run.

    Args:
        expected: the undisturbed answer to each request, by number.
        explains_break: (time_s, within_s) -> whether an HTTP process was killed shortly before.
    """

    def __init__(self, expected: Mapping[int, Answer], explains_break: Callable[[float, float], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []
        """Failed checks, at most `MAX_FINDINGS`: the job, its answer and the expected answer."""
        self.num_findings = 0
        self._expected = expected
        self._explains_break = explains_break
        self._ended: set[int] = set()

    def take(self, job: ChaosJob, result: Result) -> bool:
        """Check a result; return True if the job must be retried because its HTTP process was killed."""
        if result.outcome is ChaosOutcome.BROKEN:
            if self._explains_break(result.time_s, BREAK_WITHIN_S) and job.num_retries < MAX_RETRIES:
                self.counts["retried: its HTTP process was killed"] += 1
                return True
            self._find("the connection broke, and no process was killed shortly before", job, result)
        elif result.outcome is ChaosOutcome.FAILED:
            self._find("no good answer", job, result)
        elif job.number in self._ended:
            self._find("answered twice", job, result)
        else:
            self._compare(job, result)
        self._ended.add(job.number)
        return False

    def on_client_death(self, job: ChaosJob) -> None:
        """Count a job whose client process was killed; it will be retried."""
        self.counts["retried: the application was killed"] += 1

    def _compare(self, job: ChaosJob, result: Result) -> None:
        assert result.answer is not None
        expected = self._expected[job.request.number]
        if result.outcome is ChaosOutcome.ANSWERED:
            is_right = _canonical(result.answer) == _canonical(expected)
        else:
            is_right = is_beginning(result.answer, expected)
        if is_right:
            self.counts[_RIGHT[result.outcome]] += 1
            if "data" in result.answer:
                self.counts["pooled texts compared"] += len(result.answer["data"])
            else:
                self.counts["tokens compared"] += sum(len(choice["token_ids"]) for choice in result.answer["choices"])
        else:
            self._find("the answer differs", job, result)

    def _find(self, what: str, job: ChaosJob, result: Result) -> None:
        self.counts[what] += 1
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(
                {
                    "what": what,
                    "job": msgspec.to_builtins(job),
                    "detail": result.detail,
                    "got": result.answer,
                    "expected": self._expected.get(job.request.number),
                    "time_s": result.time_s,
                }
            )


_RIGHT = {
    ChaosOutcome.ANSWERED: "equal, bit for bit",
    ChaosOutcome.LEFT: "left midway, equal so far",
    ChaosOutcome.ABORTED: "aborted midway, equal so far",
}


def _canonical(answer: Answer) -> str:
    """Return JSON text that is equal only for equal bits: Python prints floats so that they round-trip."""
    return json.dumps(answer, sort_keys=True)
