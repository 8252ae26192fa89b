"""`python -m octavo.worker_proc.quantization`: runs one job, which it reads from standard input.

`octavo quantize` runs it, because the frontend imports no torch. Reports go to standard output; see
`octavo.protocol.quantization_job`.
"""

import sys
import time

import msgspec

from octavo.protocol.errors import ConfigError
from octavo.protocol.quantization_job import Failed, Progress, QuantizationJob, Report

_SECONDS_BETWEEN_REPORTS = 0.2


def main() -> int:
    """Run the job. Return the exit code."""
    # Imported here because torch takes seconds, in which Ctrl-C must work too.
    from octavo.worker_proc.quantization.run import quantize

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizationJob)
    latest = float("-inf")

    def report(fraction: float) -> None:
        nonlocal latest
        if time.monotonic() >= latest + _SECONDS_BETWEEN_REPORTS:
            latest = time.monotonic()
            _write(Progress(fraction))

    try:
        _write(quantize(job, report))
    except ConfigError as error:
        _write(Failed(error.message, error.hint))
        return 1
    return 0


def _write(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # `octavo quantize` got the same signal, and says so
        sys.exit(130)
