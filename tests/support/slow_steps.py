"""A logits processor that sleeps, so that a request is still running when a test kills something that it needs.

Without it, a request to a tiny model ends in milliseconds; on a busy machine, before the test can disturb it.
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
    """Sleeps in each step of a request that requests it."""

    def is_argmax_invariant(self) -> bool:
        """Return `False`, so that the processor also runs for greedy requests."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return the request's processor. `None` if it is not slow."""
        return _sleep if (params.extra_args or {}).get("is_slow") else None


def _sleep(output: Any, logits: Any) -> Any:
    time.sleep(STEP_S)
    return logits
