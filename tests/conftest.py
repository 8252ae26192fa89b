"""Fixtures and options that every kind of test may use."""

import contextlib
import gc
import os
import random
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python
from default_model import ModelMissing, default_model, embedding_model, speech_model
from httpx_certificates import share_certificates
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from leaks import kill, leaked_processes

import octavo.frontend.fork_server

pytest_plugins = ["time_limit"]

MARK = "OCTAVO_TEST_SESSION"
TESTS = Path(__file__).parent

# No test may access a model hub. Libraries read this variable when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torch's threads spin between operations by default, which starves other processes on a busy machine. One thread is
# enough for the small tensors of tests. Read when torch is imported; worker processes set both for themselves.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")

share_certificates()

# All engines of this process have their workers forked from one server, even if no test needs an engine for a while.
octavo.frontend.fork_server.IDLE_S = 600.0

# Half of the time of the collection went into searching its objects, which all stay, for garbage.
gc.disable()

# The suite starts hundreds of processes. Without bytecode files each of them compiles every module it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONGEST_FILES = (
    "kernels/test_triton_interpreter.py",
    "kernels/test_paged_attention_native.py",
    "e2e/test_docs_examples.py",
    "ipc/test_worker_recovery.py",
    "e2e/test_smollm2.py",
    "e2e/test_tensor_parallel.py",
    "e2e/test_determinism.py",
    "e2e/test_http_schema.py",
    "e2e/test_media.py",
    "e2e/test_media_models.py",
    "e2e/test_draft_heads.py",
    "e2e/test_fallback.py",
    "e2e/test_core_recovery.py",
    "stress/test_chaos.py",
    "e2e/test_whisper.py",
    "e2e/test_nodes.py",
    "e2e/test_model_parity.py",
    "e2e/test_precomputed_media.py",
    "e2e/test_quantize_command.py",
    "e2e/test_whisper_tiny.py",
    "e2e/test_live_weights.py",
    "e2e/test_cli_bench.py",
    "e2e/test_determinism_random.py",
    "e2e/test_server_recovery.py",
    "stress/test_simulation.py",
    "e2e/test_model_families.py",
    "e2e/test_videos.py",
    "e2e/test_state_models.py",
    "kernels/test_kernel_instructions.py",
    "e2e/test_data_parallel.py",
    "unit/test_weight_updates.py",
    "e2e/test_http_processes.py",
    "e2e/test_tool_calls.py",
    "e2e/test_quantized_checkpoints.py",
    "unit/test_core_grammar_matcher.py",
    "e2e/test_dashboard.py",
    "e2e/test_worker_recovery.py",
    "e2e/test_audio_in_prompts.py",
    "ipc/test_core_process.py",
    "kernels/test_kernel_budgets.py",
    "kernels/test_linear_native.py",
    "unit/test_media_processor.py",
    "e2e/test_cli_run_batch.py",
    "kernels/test_experts.py",
    "e2e/test_vllm_examples.py",
    "e2e/test_lifecycle.py",
    "e2e/test_receipts.py",
    "e2e/test_retrieval.py",
    "e2e/test_weights_packed.py",
    "e2e/test_speculation.py",
    "e2e/test_live_weights_storms.py",
    "e2e/test_weights_quantized.py",
    "e2e/test_watchdog.py",
    "ipc/test_shared_fork_server.py",
    "e2e/test_pooling_engines.py",
    "e2e/test_weights_memory.py",
)
"""Files that take more than ten seconds. They run first, so that no process works alone at the end of the run."""

# The same examples in every run, however slow the machine; the long forms go and look for new ones.
settings.register_profile("short", derandomize=True, deadline=None)
settings.register_profile("long", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms of the stress tests as well")
    parser.addoption("--clients", action="store_true", help="run the tests of client libraries (scripts/test_clients)")


def pytest_configure(config: pytest.Config) -> None:
    is_long = config.getoption("--long")
    settings.load_profile("long" if is_long else "short")
    if not is_long:
        # Examples also draw on the constants of the local modules that are loaded. They would change with every commit
        # and with the files that a process happened to run before. No setting turns that off.
        providers.is_local_module_file = lambda path: False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need the model, deselect those that need an option, move the longest files to the front."""
    for item in items:
        if {"smollm2_gguf", "minilm", "whisper_tiny"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("model")
    for mark in ("long", "clients"):
        if not config.getoption(f"--{mark}"):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """Exclude libraries and thousands of tests, which all stay, from garbage collections, and enable those."""
    gc.collect()
    gc.freeze()
    # Fewer collections than by default, which take a seventh of the time of Triton's interpreter.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the run when an engine process of this run outlives its tests; end it all the same."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    yield
    octavo.frontend.fork_server.fork_server.close()
    warm_python.close()
    left = leaked_processes(f"{MARK}={mark}", timeout_s=30.0)
    kill(list(left))
    assert not left, f"octavo processes were left behind: {left}"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct. Never skips: a test that did not run proves nothing."""
    try:
        return default_model()
    except ModelMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the directory of all-MiniLM-L6-v2. Never skips, either."""
    try:
        return embedding_model()
    except ModelMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def whisper_tiny() -> Path:
    """Return the directory of Whisper tiny.en. Never skips, either."""
    try:
        return speech_model()
    except ModelMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing uses or is likely to be given: tests bind it seconds later.

    The system chooses the ports of other tests' connections, and of servers with `--port 0`, from a range of its own.
    What is below it is divided among the processes of pytest-xdist.
    """
    chosen_by_system, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.SystemRandom().randrange(1024 + index, max(chosen_by_system, 2048), count)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
