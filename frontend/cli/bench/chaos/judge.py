"""`Judge`: compares what requests were answered in a storm with what each is answered alone, and keeps count.

Asks nothing and knows no process.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.frontend.cli.bench.chaos.answers import Answer, is_beginning
from octavo.frontend.cli.bench.chaos.jobs import Fate, Job, Result

BREAK_WITHIN_S = 10.0
"""How long after an HTTP process was killed its callers may take to notice."""

MAX_RETRIES = 20

MAX_FINDINGS = 50
"""Told in full; more are only counted."""


class Judge:
    """Takes every result of a run.

    Args:
        expected: the answer to each request, by number.
        explains_break: whether a kill explains that a connection broke at a time.
    """

    def __init__(self, expected: Mapping[int, Answer], explains_break: Callable[[float, float], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []
        """What must not be, `MAX_FINDINGS` of them at most: jobs with what they got and what was right."""
        self.num_findings = 0
        self._expected = expected
        self._explains_break = explains_break
        self._ended: set[int] = set()

    def take(self, job: Job, result: Result) -> bool:
        """Judge a result; True if the job must be done again, as what it was asked of was killed."""
        if result.fate is Fate.BROKEN:
            if self._explains_break(result.time_s, BREAK_WITHIN_S) and job.num_retries < MAX_RETRIES:
                self.counts["asked again: its HTTP process was killed"] += 1
                return True
            self._find("the connection broke, and no kill explains it", job, result)
        elif result.fate is Fate.FAILED:
            self._find("no good answer", job, result)
        elif job.number in self._ended:
            self._find("answered twice", job, result)
        else:
            self._compare(job, result)
        self._ended.add(job.number)
        return False

    def take_death(self, job: Job) -> None:
        """The process that had asked was killed: the job will be done again."""
        self.counts["asked again: the application was killed"] += 1

    def _compare(self, job: Job, result: Result) -> None:
        assert result.answer is not None
        expected = self._expected[job.request.number]
        if result.fate is Fate.ANSWERED:
            is_right = _canonical(result.answer) == _canonical(expected)
        else:
            is_right = is_beginning(result.answer, expected)
        if is_right:
            self.counts[_RIGHT[result.fate]] += 1
            self.counts["tokens compared"] += sum(len(choice["token_ids"]) for choice in result.answer["choices"])
        else:
            self._find("the answer differs", job, result)

    def _find(self, what: str, job: Job, result: Result) -> None:
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
    Fate.ANSWERED: "equal, bit for bit",
    Fate.LEFT: "left midway, equal so far",
    Fate.ABORTED: "aborted midway, equal so far",
}


def _canonical(answer: Answer) -> str:
    """Return a text that is the same for the same bits only: Python writes every float so that it is read back."""
    return json.dumps(answer, sort_keys=True)
