"""A logits processor that hangs, so that a test can kill processes at a known point while its requests run."""

import time
from pathlib import Path
from typing import Any

from octavo import AdapterLogitsProcessor

PLUGIN = f"{__file__}:HungSteps"
"""The value of `--logits-processors`."""


def hang_at(marks: dict[int, Path]) -> dict[str, Any]:
    """Return the `extra_args` of a request that hangs its worker at the given numbers of tokens. Tokens are unaffected.

    The worker first creates the mark's file. A mark whose file exists is skipped, so each mark hangs only one worker.
    """
    return {"hang_at": [(num_tokens, str(path)) for num_tokens, path in marks.items()]}


class HungSteps(AdapterLogitsProcessor):
    """Hangs at the marks of a request."""

    def is_argmax_invariant(self) -> bool:
        """Return `False`, so that the processor also runs for greedy requests."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return the request's processor. `None` if it has no marks."""
        marks = [(num_tokens, Path(path)) for num_tokens, path in (params.extra_args or {}).get("hang_at", ())]

        def hang(output: Any, logits: Any) -> Any:
            for num_tokens, path in marks:
                if len(output) >= num_tokens and not path.exists():
                    path.touch()
                    time.sleep(3600)
            return logits

        return hang if marks else None
