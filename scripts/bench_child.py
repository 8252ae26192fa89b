"""`BenchChild`: an engine in a separate process, which responds with lines of JSON."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any


class BenchChild:
    """A running engine. Its first line of JSON says that it is ready.

    Args:
        name: name of the engine, for errors.
        command: command of the process.
        environment: all of its variables.
    """

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def measure(self, task: Any) -> dict[str, Any]:
        """Return what the engine measured of a task.

        Raises:
            SystemExit: it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print too
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} has ended")
