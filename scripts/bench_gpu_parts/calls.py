"""The caller's side of a process that may crash; callee.py is the other side and defines the messages."""

from typing import Any

from bench_cpu_parts.session import Conversation


class Calls(Conversation):
    """A process that serves function calls."""

    def call(self, name: str, limit_s: float, /, **arguments: Any) -> Any:
        """Call a function in the process and return its result.

        Raises:
            EngineFailure: the function raised, or took longer than the limit.
        """
        reply = self.ask({"call": name, "arguments": arguments}, limit_s)
        if "error" in reply:
            raise self.failure(f"{name}: {reply['error']}")
        return reply["result"]
