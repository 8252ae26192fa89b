"""Workers on several nodes that an outside launcher starts: here processes of one machine, with keys between them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from node_answers import answers
from servers import of_module, serve
from tiny_models import make_tiny

from octavo.frontend.cli.main import main

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32}


def test_requests_survive_the_death_of_a_node(tmp_path: Path, free_port: int) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model", intermediate_size=512, **SIZES)
    for name in ("group", "other"):
        assert main(["keygen", name, "--directory", str(tmp_path)]) == 0
    flags = ["--served-model-name", "m", "--max-model-len", "1024", "--num-threads", "1"]
    nodes = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(free_port)]
    nodes += ["--group-secret-key-file", str(tmp_path / "group.key_secret")]
    with serve(model, *flags) as alone:
        alone.wait_until_ready()
        expected = answers(alone)
    with serve(model, *flags, *nodes) as server, serve(model, *flags, *nodes, "--node-rank", "1") as node:
        server.wait_until_ready()
        assert answers(server) == expected, "two nodes give the bits of one worker"
        (worker,) = of_module(node.process.pid, "octavo.worker_proc")
        assert answers(server, lambda: os.kill(worker, signal.SIGKILL)) == expected
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(answers, server, lambda: node.signal(signal.SIGKILL))
            server.wait_for("lost node 1")
            with serve(model, *flags, *nodes, "--node-rank", "1") as successor:
                assert asking.result(timeout=60) == expected
                server.signal(signal.SIGTERM)
                assert (server.wait(30), successor.wait(30)) == (0, 0)
                assert "the engine has ended" in successor.last_line


@pytest.mark.long
@pytest.mark.parametrize("flags", [["--cpu-kernels", "torch"], ["--cpu-kernels", "native"]])
def test_requests_survive_the_death_of_the_core(tmp_path: Path, free_port: int, flags: list[str]) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model", intermediate_size=512, **SIZES)
    flags += ["--served-model-name", "m", "--max-model-len", "1024", "--num-threads", "1"]
    flags += ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(free_port)]
    with serve(model, *flags) as server, serve(model, *flags, "--node-rank", "1") as node:
        server.wait_until_ready()
        expected = answers(server)
        (core,) = of_module(server.process.pid, "octavo.core_proc")
        assert answers(server, lambda: os.kill(core, signal.SIGKILL)) == expected
        assert node.output.count("joined the engine") == 2
