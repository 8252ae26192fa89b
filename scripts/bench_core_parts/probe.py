"""How long the core's loop takes to answer: a process of its own that asks again and again, and prints what it took.

An answer is delayed by whatever keeps the loop from turning, as `/health` is by a loop that does not beat.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.002


@contextmanager
def probing(address: str) -> Iterator[list[float]]:
    """Probe a core meanwhile; afterwards the list holds the seconds that each answer took."""
    latencies: list[float] = []
    scripts = Path(__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(scripts)!r}); import bench_core_parts.probe as p; p.main({address!r})"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdout.readline()
            yield latencies
            process.stdin.write(b"\n")
            process.stdin.flush()
            latencies += json.loads(process.stdout.readline())
        finally:
            process.kill()


def main(address: str) -> None:
    """Probe until a line comes on standard input."""
    import select

    from bench_core_parts.engine import Client

    client = Client(address)
    client.stats()
    print("ready", flush=True)
    latencies: list[float] = []
    while not latencies or not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        start = time.perf_counter()
        client.stats()
        latencies.append(time.perf_counter() - start)
    print(json.dumps(latencies), flush=True)
