"""Renders the untrusted chat templates of requests in separate processes with time and memory limits.

The sandbox prevents side effects but cannot limit memory; the operating system can. Each process renders one template
and exits, so no state passes from one request to the next.
"""

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.template_sandbox import TIME_LIMIT_S
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.lifecycle import die_with_parent

MEMORY_LIMIT_BYTES = 512 * 2**20
"""Limit of the process's address space; the interpreter uses about a tenth of it."""
START_TIME_S = 20.0
"""Seconds that the process may take in addition to the rendering, on a busy machine."""
MAX_TEXT_CHARS = 16 * 2**20
"""Maximum characters of the text; no model has such a large context."""
MAX_PROCESSES = 2
"""Number of concurrent processes; further requests wait."""


class RenderJob(msgspec.Struct, array_like=True):
    """A template and its input."""

    parent: int
    source: str
    special_tokens: dict[str, str]
    content_format: FormatChoice
    messages: list[dict[str, Any]]
    variables: dict[str, Any]


class RenderResult(msgspec.Struct, array_like=True):
    """The rendered text, or an error."""

    text: str | None
    error: str = ""
    param: str | None = None


class TemplateProcesses:
    """Renders templates in separate processes, a few at a time. Belongs to one event loop."""

    def __init__(self) -> None:
        self._gate = asyncio.Semaphore(MAX_PROCESSES)

    async def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        content_format: FormatChoice,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text; see `ChatTemplate`.

        Raises:
            InvalidRequestError: the template is invalid, rejects the messages, or exceeds a limit.
        """
        job = RenderJob(
            os.getpid(), source, dict(special_tokens), content_format, [*map(dict, messages)], dict(variables)
        )
        try:
            encoded = msgspec.json.encode(job)
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", "messages") from None
        async with self._gate:
            outcome = await _run(encoded)
        if outcome.text is None:
            raise InvalidRequestError(outcome.error, outcome.param)
        return outcome.text


async def _run(job: bytes) -> RenderResult:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "octavo.frontend.text.template_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_TIME_S + TIME_LIMIT_S):
            answer, _ = await process.communicate(job)
        return msgspec.json.decode(answer, type=RenderResult)
    except (TimeoutError, msgspec.DecodeError):
        return RenderResult(None, "the chat template exceeds its time or memory limit", "chat_template")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _render(job: RenderJob) -> RenderResult:
    try:
        template = ChatTemplate(job.source, job.special_tokens, content_format=job.content_format)
        text = template.render(job.messages, **job.variables)
    except InvalidRequestError as error:
        return RenderResult(None, error.message, error.param)
    if len(text) > MAX_TEXT_CHARS:
        return RenderResult(None, f"the chat template renders more than {MAX_TEXT_CHARS} characters", "chat_template")
    return RenderResult(text)


def main() -> None:
    """Read a `RenderJob` from standard input, render it, and write the `RenderResult` to standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    cpu_limit_s = int(2 * TIME_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=RenderJob)
    die_with_parent(job.parent)
    sys.stdout.buffer.write(msgspec.json.encode(_render(job)))


if __name__ == "__main__":
    main()
