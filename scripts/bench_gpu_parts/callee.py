"""A process that serves function calls: JSON lines in, JSON lines out. Independent of GPUs; imports little.

output      a greeting, {}, then {"result": ...} or {"error": the end of a traceback} for each input
input       {"call": name, "arguments": {...}}; its end is the end of the process
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from bench_cpu_parts.drive_loop import claim_output

ERROR_LINES = 4


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until the input ends; a failure is reported and does not end this process."""
    replies = claim_output()
    print("{}", file=replies)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            reply = {"result": functions[job["call"]](**job["arguments"])}
        except Exception:  # process boundary: the caller gets the error and can call again
            traceback.print_exc()
            reply = {"error": "\n    ".join(traceback.format_exc().splitlines()[-ERROR_LINES:])}
        print(json.dumps(reply), file=replies)
