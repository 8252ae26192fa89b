"""A logits processor that hangs: a test kills processes at a known place, while its requests certainly run."""

import time
from pathlib import Path
from typing import Any

from octavo import AdapterLogitsProcessor

PLUGIN = f"{__file__}:HungSteps"
"""The value of `--logits-processors`."""


def hang_at(marks: dict[int, Path]) -> dict[str, Any]:
    """Return the `extra_args` of a request that hangs its worker when it has so many tokens. Its tokens are the same.

    The worker creates the mark's file first. A mark whose file exists is passed, so each one hangs one worker.
    """
    return {"hang_at": [(num_tokens, str(path)) for num_tokens, path in marks.items()]}


class HungSteps(AdapterLogitsProcessor):
    """Hangs at the marks of a request."""

    def is_argmax_invariant(self) -> bool:
        """Return False: for greedy requests it must not be left out either."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return what hangs, or None."""
        marks = [(num_tokens, Path(path)) for num_tokens, path in (params.extra_args or {}).get("hang_at", ())]

        def hang(output: Any, logits: Any) -> Any:
            for num_tokens, path in marks:
                if len(output) >= num_tokens and not path.exists():
                    path.touch()
                    time.sleep(3600)
            return logits

        return hang if marks else None
