"""Statistics of speculative decoding during a benchmark, from differences of the server's counters."""

import re
import time
from collections.abc import Iterator
from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.errors import CommandError

REPORT_DELAY_S = 0.1
"""Seconds to wait: an engine reports its counters when it becomes idle, just after the last response."""

_SAMPLE = re.compile(r"^(octavo|vllm):spec_decode_num_(\w+?)_total\{(.*?)\} ([0-9.e+]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


class SpeculationMeter:
    """Reads the counters of a server before and after its load.

    Args:
        api: the server. The statistics are empty if it lacks `/metrics` or these counters.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._before: dict[str, float] = {}

    def start(self) -> None:
        """Read the counters that `figures` subtracts. Blocks until the server has responded."""
        time.sleep(REPORT_DELAY_S)
        self._before = self._read()

    def figures(self) -> dict[str, Any]:
        """Return the statistics since `start` under the names of vLLM's result files; {} if no tokens were drafted."""
        time.sleep(REPORT_DELAY_S)
        after = self._read()
        grown = {name: int(count - self._before.get(name, 0.0)) for name, count in after.items()}
        num_drafts, num_tokens = grown.get("drafts", 0), grown.get("draft_tokens", 0)
        if num_drafts <= 0 or num_tokens <= 0:
            return {}
        num_accepted = grown["accepted_tokens"]
        per_position = [grown[str(position)] / num_drafts for position in range(sum(name.isdigit() for name in grown))]
        while per_position and not per_position[-1]:  # there are series for more positions than are drafted
            per_position.pop()
        return {
            "spec_decode_acceptance_rate": 100 * num_accepted / num_tokens,
            "spec_decode_acceptance_length": 1 + num_accepted / num_drafts,
            "spec_decode_num_drafts": num_drafts,
            "spec_decode_draft_tokens": num_tokens,
            "spec_decode_accepted_tokens": num_accepted,
            "spec_decode_per_position_acceptance_rates": per_position,
        }

    def _read(self) -> dict[str, float]:
        """Return sums over all engines: counters by name, and accepted tokens by position."""
        try:
            text = self._api.get_text("/metrics")
        except CommandError:
            return {}
        sums: dict[str, float] = {}
        samples = _SAMPLE.findall(text)
        # With --enable-vllm-metrics a server exports each counter under both prefixes.
        for _, name, labels, value in [sample for sample in samples if sample[0] == samples[0][0]]:
            position = _POSITION.search(labels)
            key = position[1] if position else name
            sums[key] = sums.get(key, 0.0) + float(value)
        return sums


def speculation_rows(figures: dict[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield the rows of the table as vLLM prints them."""
    yield "Acceptance rate (%)", figures["spec_decode_acceptance_rate"]
    yield "Acceptance length", figures["spec_decode_acceptance_length"]
    yield "Drafts", figures["spec_decode_num_drafts"]
    yield "Draft tokens", figures["spec_decode_draft_tokens"]
    yield "Accepted tokens", figures["spec_decode_accepted_tokens"]
    for position, rate in enumerate(figures["spec_decode_per_position_acceptance_rates"]):
        yield f"Position {position}: acceptance (%)", 100 * rate
