"""A time limit for each test, so that a test that hangs fails with its stacks instead of blocking the run.

Each phase of a test (its fixtures, its call, their teardown) may take `test_time_limit_s`. Then the stacks of all
threads and child processes go to its captured output and the test fails. Tests marked `long` have no limit, nor have
those marked `runs_pytest` or `clients`: what they run has its own. A test that does not react, because it hangs
outside Python, ends its process after twice the time; the other process of the run continues and reports it.
"""

import faulthandler
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from octavo.protocol.stacks import STANDARD_ERROR, process_tree

REPEAT_S = 10.0
"""A failure that something swallows (in a callback, in a task that is not awaited) is raised again after this long."""

_REAL_STANDARD_ERROR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("test_time_limit_s", "limit for each phase of a test in seconds; 0: none", default="600")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "runs_pytest: runs tests in a process of its own; no limit but theirs")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[_REAL_STANDARD_ERROR] = os.dup(STANDARD_ERROR)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_REAL_STANDARD_ERROR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from _limited(item))


def _limited(item: pytest.Item) -> Iterator[None]:
    limit_s = float(item.config.getini("test_time_limit_s"))
    if not limit_s or any(item.get_closest_marker(name) for name in ("long", "runs_pytest", "clients")):
        return (yield)

    def expire(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(STANDARD_ERROR)
        for process in process_tree(os.getpid())[1:]:
            process.request_dump()
        pytest.fail(f"the test took longer than {limit_s:g} s; the stacks are in its captured stderr")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s, REPEAT_S)
    faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=item.config.stash[_REAL_STANDARD_ERROR])
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
