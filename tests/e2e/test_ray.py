"""Workers as actors of a Ray cluster with several nodes, which are processes of this machine.

Long: a cluster takes seconds to start. Ray is an extra; without it these tests are skipped.
"""

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_answers import answers
from servers import serve
from tiny_models import make_tiny

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: scripts/setup test ray"),
]

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32}
FLAGS = ["--served-model-name", "m", "--max-model-len", "1024", "--num-threads", "1"]


class RayCluster:
    """A cluster in a process of its own, because Ray changes signal handlers and warns."""

    def __init__(self, num_nodes: int) -> None:
        program = str(Path(__file__).parents[1] / "support" / "ray_cluster.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", program, str(num_nodes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._answer("address")

    def _answer(self, kind: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(kind):
                return line.split()[1]
        raise AssertionError("the cluster did not start")

    def kill_node(self, node_id: str) -> None:
        """Kill the node whose id begins so, with everything that runs there."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{node_id}\n")
        self.process.stdin.flush()
        assert self._answer("killed") == node_id

    def add_node(self) -> None:
        """Add a node with one processor."""
        assert self.process.stdin is not None
        self.process.stdin.write("add\n")
        self.process.stdin.flush()
        self._answer("added")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(num_nodes=3)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("models"), intermediate_size=512, **SIZES)


def test_a_node_is_killed_under_load(cluster: RayCluster, model: Path) -> None:
    with serve(model, *FLAGS) as alone:
        alone.wait_until_ready()
        expected = answers(alone)
    ray = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"]
    with serve(model, *FLAGS, *ray, environment={"RAY_ADDRESS": cluster.address}) as server:
        server.wait_until_ready()
        nodes = re.findall(r"starting worker \d on node \S+ \((\w+)\)", server.output)
        assert len(set(nodes)) == 2, "each node has one processor"
        assert answers(server, lambda: cluster.kill_node(nodes[1])) == expected, "the bits of one worker"
        server.wait_for(f"lost node .*{nodes[1]}")
        server.wait_for("the workers are back")
        assert answers(server) == expected


def test_an_engine_of_several_is_killed_with_its_node(cluster: RayCluster, model: Path) -> None:
    with serve(model, *FLAGS) as alone:
        alone.wait_until_ready()
        expected = answers(alone)
    ray = ["--data-parallel-size", "2", "--data-parallel-backend", "ray"]
    with serve(model, *FLAGS, *ray, environment={"RAY_ADDRESS": cluster.address}) as server:
        server.wait_until_ready()
        nodes = re.findall(r"engine \d is at \S+ on node \S+ \((\w+)\)", server.output)
        assert len(set(nodes)) == 2
        assert answers(server, lambda: cluster.kill_node(nodes[0])) == expected, "the other engine continues"
        cluster.add_node()
        server.wait_for("engine 0 is at", count=2)
        server.wait_for("the engine is back")
        assert answers(server) == expected
        assert all(engine["state"] == "up" for engine in server.get("/health").json()["engines"])
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
