"""Fixtures and options that every kind of test may use."""

import gc
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from default_model import DefaultModelMissing, default_model
from hypothesis import settings
from leaks import kill, leaked_processes

MARK = "OCTAVO_TEST_SESSION"

# No test may wait for, or depend on, what a model hub answers; libraries read this when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torch's thread pool otherwise spins for a long time between two operations, which starves the other processes
# of a busy machine; read when torch is imported. Workers set the same for themselves.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The same examples in every run, however slow the machine; the long forms go and look for new ones.
settings.register_profile("short", derandomize=True, deadline=None)
settings.register_profile("long", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms of the stress tests as well")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs the model, and leave the long forms out unless they are asked for."""
    for item in items:
        if "smollm2_gguf" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        if long:
            config.hook.pytest_deselected(items=long)
            items[:] = [item for item in items if item not in long]


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what stays for good: libraries, and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the run when an engine process of this run outlives its tests; end it all the same."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    yield
    left = leaked_processes(f"{MARK}={mark}", timeout_s=5.0)
    kill(list(left))
    assert not left, f"octavo processes were left behind: {left}"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct. Never skips: a test that did not run proves nothing."""
    try:
        return default_model()
    except DefaultModelMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port that nothing on 127.0.0.1 listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
