"""How an engine without HTTP ends: drained, forced, or after a failure. No processes."""

import asyncio

import pytest

from octavo.frontend.headless import _drain
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.supervise import ChildExited


class Engine:
    """One that ends as it is told to, or never."""

    def __init__(self, exited: ChildExited | None, *, hangs: bool = False) -> None:
        self._exited = exited
        self._hangs = hangs

    async def drain(self) -> ChildExited | None:
        if self._hangs:
            await asyncio.Event().wait()
        return self._exited


def drained(engine: Engine, *, timeout_s: float = 60.0, is_signalled_again: bool = False) -> None:
    async def scenario() -> None:
        told = asyncio.Semaphore(int(is_signalled_again))
        await asyncio.wait_for(_drain([engine], timeout_s, told), 30)  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_an_engine_that_finishes_ends_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo")
    drained(Engine(ChildExited("core", 0, None)))
    assert [record.levelname for record in caplog.records] == ["INFO"], "nothing is aborted"


@pytest.mark.parametrize(
    ("exited", "words"),
    [(ChildExited("core", -9, None), "while draining"), (None, "had not restarted yet")],
    ids=["meanwhile", "before"],
)
def test_requests_that_are_lost_are_no_orderly_end(exited: ChildExited | None, words: str) -> None:
    with pytest.raises(EngineDeadError, match=words):
        drained(Engine(exited))


@pytest.mark.parametrize(("timeout_s", "is_signalled_again"), [(0.01, False), (60.0, True)])
def test_a_drain_ends_at_the_timeout_or_the_second_signal(
    timeout_s: float, is_signalled_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drained(Engine(None, hangs=True), timeout_s=timeout_s, is_signalled_again=is_signalled_again)
    assert "aborting the remaining requests" in caplog.text
