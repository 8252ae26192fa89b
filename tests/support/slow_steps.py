"""A logits processor that takes its time, so that a request still runs when a test kills something it needs.

Without it a request of a tiny model ends in milliseconds, on a busy machine before the test that wants to disturb it.
"""

import time
from typing import Any

from octavo import AdapterLogitsProcessor

STEP_S = 0.02

SLOW = {"is_slow": True}
"""The `extra_args` (over HTTP: `vllm_xargs`) of a request whose steps take `STEP_S` longer. Its tokens are the same."""

PLUGIN = f"{__file__}:SlowSteps"
"""The value of `--logits-processors`."""


class SlowSteps(AdapterLogitsProcessor):
    """Sleeps in each step of a request that asks for it."""

    def is_argmax_invariant(self) -> bool:
        """Return False: for greedy requests it must not be left out either."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return what sleeps, or None."""
        return _sleep if (params.extra_args or {}).get("is_slow") else None


def _sleep(output: Any, logits: Any) -> Any:
    time.sleep(STEP_S)
    return logits
