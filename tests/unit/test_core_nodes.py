"""Workers on several nodes: agents in threads, which start workers without a model."""

import os
import threading
from pathlib import Path

import msgspec
import pytest
from specs import PYTHONPATH, core_spec, some_config, some_facts
from waiting import wait_until

from octavo.core_proc.cache.sizing import plan_cache
from octavo.core_proc.workers import agent as agent_module
from octavo.core_proc.workers import nodes as nodes_module
from octavo.core_proc.workers.agent import NodeAgent
from octavo.core_proc.workers.agents import Agents
from octavo.core_proc.workers.group import WorkerFailed
from octavo.core_proc.workers.nodes import LaunchedNodes
from octavo.core_proc.workers.remote import RemoteWorkerGroup
from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.control import AgentSpec
from octavo.protocol.curve import GroupKeys, write_pair
from octavo.protocol.errors import ConfigError, StartupError
from octavo.protocol.nodes import AgentReady
from octavo.protocol.steps import StepPlan
from octavo.protocol.version import __version__
from octavo.protocol.worker_commands import Profile


class Signals:
    """A `StopSignal` of a thread."""

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def stop(self) -> None:
        self.count += 1
        os.write(self._writer, b"x")


class Node:
    """An agent on a thread of its own."""

    def __init__(
        self, core_address: str, position: int, secret: str = "", capacity: int = 1, model: ModelFacts | None = None
    ) -> None:
        self.signals = Signals()
        self.error: StartupError | None = None
        self.spec = AgentSpec(
            core_address=core_address,
            secret=secret,
            node=f"node-{position}",
            position=position,
            capacity=capacity,
            worker_module="core_fake_worker",
            model=model,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            NodeAgent(self.spec, self.signals).run()
        except StartupError as error:
            self.error = error

    def end(self) -> None:
        self.signals.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


def ready_group(agents: Agents, **settings: object) -> RemoteWorkerGroup:
    config = some_config(tensor_parallel_size=2, **settings)
    return RemoteWorkerGroup(agents, config, log_level="INFO")


def start(group: RemoteWorkerGroup) -> None:
    config = some_config(tensor_parallel_size=2)
    stop = Signals()
    group.start(SilentReporter(), stop)  # type: ignore[arg-type]
    plan = plan_cache(config, group.facts)
    group.allocate(plan, stop)  # type: ignore[arg-type]
    group.warm_up(stop)  # type: ignore[arg-type]


class SilentReporter:
    def send(self, message: object) -> None:
        pass


def exchange(group: RemoteWorkerGroup) -> None:
    """Send a command that all ranks answer."""
    group.broadcast(Profile(group.next_sequence, None))
    for _ in range(2):
        wait_until(lambda: group.gather() is not None, lambda: "a reply")


def test_nodes_are_lost_and_replaced() -> None:
    keys = GroupKeys.create()
    secret = keys.secret.decode()
    agents = Agents("tcp://127.0.0.1:*", keys, num_positions=2)
    nodes = [Node(agents.address, position, secret) for position in (1, 0)]
    group = ready_group(agents)
    try:
        start(group)
        assert [facts.rank for facts in group.facts] == [0, 1]
        exchange(group)
        nodes[0].end()
        with pytest.raises(WorkerFailed, match="lost node node-1 with worker 1"):
            wait_until(lambda: group.gather() is not None, lambda: "the loss")
        group.abandon()
        wait_until(lambda: group.has_exited, lambda: "the end of the group")
        plan = plan_cache(some_config(tensor_parallel_size=2), group.facts)
        group = group.restart()
        assert not group.advance(plan), "a node is missing"
        assert agents.missing(2) == "nodes 1 of 2 have not joined"
        nodes[0] = Node(agents.address, 1, secret)
        wait_until(lambda: group.advance(plan), lambda: "the next group")
        exchange(group)
        group.stop()
    finally:
        group.kill()
        for node in nodes:
            node.end()
    assert not any(node.error for node in nodes), "an engine that ends dismisses its nodes"


def test_a_rank_that_dies_is_named_with_its_node() -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    node = Node(agents.address, 0, capacity=2)
    group = RemoteWorkerGroup(agents, fault_config("fatal"), log_level="INFO")
    try:
        start(group)
        with pytest.raises(WorkerFailed, match=r"worker [01] exited with code 9 on node node-0"):
            group.broadcast(StepPlan(group.next_sequence, [], [], [], []))
            wait_until(lambda: group.gather() is not None, lambda: "its death")
    finally:
        group.kill()
        node.end()


def fault_config(fault: str) -> ResolvedConfig:
    config = some_config(tensor_parallel_size=2)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, architecture=fault))


def test_a_start_that_fails_names_the_root_cause() -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    node = Node(agents.address, 0, capacity=2)
    group = RemoteWorkerGroup(agents, fault_config("no start"), log_level="INFO")
    try:
        with pytest.raises(StartupError, match="the model file is wrong") as raised:
            start(group)
        assert raised.value.phase == "loading weights"
    finally:
        group.kill()
        node.end()


def test_a_node_with_another_model_is_named() -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    node = Node(agents.address, 0, capacity=2, model=some_facts(model_path="/other", hf_config={"hidden_size": 7}))
    group = ready_group(agents)
    try:
        assert group.waits_for == "nodes 0 of 1 have not joined"
        with pytest.raises(ConfigError, match="node node-0 has another model, /other, than node 0, /nowhere"):
            start(group)
        assert group.waits_for == ""
    finally:
        group.kill()
        node.end()


def test_a_stranger_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "CONNECT_TIMEOUT_S", 0.5)
    agents = Agents("tcp://127.0.0.1:*", GroupKeys.create(), num_positions=1)
    node = Node(agents.address, 0, GroupKeys.create().secret.decode())
    try:
        node.thread.join(30)
        assert node.error is not None and "cannot join the engine" in str(node.error)
        agents.poll()
        assert agents.place(0, 1) is None
    finally:
        agents.close()


def test_addresses_of_other_machines_need_keys() -> None:
    with pytest.raises(ConfigError, match="needs keys"):
        Agents("tcp://0.0.0.0:*", None)


def ready(
    agent: str,
    node: str,
    capacity: int = 1,
    host: str = "10.0.0.9",
    vectors: str = "avx2",
    release: str = __version__,
) -> AgentReady:
    return AgentReady(
        release=release,
        instruction_sets=[vectors],
        agent=agent,
        node=node,
        position=-1,
        capacity=capacity,
        memory_path=f"/proc/{agent}",
        link_address=f"{host}:1",
    )


def test_ranks_of_a_machine_are_neighbours() -> None:
    agents = Agents("tcp://127.0.0.1:*", None)
    for agent, node, host in (("1", "b", "10.0.0.2"), ("2", "a", "127.0.0.1"), ("3", "b", "10.0.0.2")):
        agents._admit(ready(agent, node, host=host))
        assert (agents.place(0, 3) is None) == (agent != "3")
    members = agents._members
    assert all(member.generation == 0 for member in members.values())
    agents.close()


def test_a_processor_that_computes_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    agents = Agents("tcp://127.0.0.1:*", None, is_uniform=True)
    agents._admit(ready("1", "a"))
    agents._admit(ready("2", "b", vectors="avx512f"))
    assert agents.place(0, 2) is None
    assert "node b cannot be used" in caplog.text and "avx2, avx512f" in caplog.text
    assert "node b cannot be used: its CPU" in agents.missing(2), "it has joined, but was refused"
    agents._admit(ready("3", "c"))
    assert agents.place(0, 2) is not None
    agents.close()


@pytest.mark.parametrize(("release", "named"), [("0.0.9", "octavo 0.0.9"), ("", "an earlier release")])
def test_a_node_of_another_release_is_not_used(release: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    old = msgspec.structs.replace(ready("1", "a", release=release), position=0)
    agents._admit(old)
    assert agents.place(0, 1) is None and named in caplog.text
    assert "node a cannot be used: it has octavo" in agents.missing(1)
    agents._admit(msgspec.structs.replace(old, agent="2", release=__version__))
    assert agents.missing(1) == "" and not agents._refused
    agents.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2}, r"nnodes 2 does not divide the number of workers \(1\)"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank 2 of nnodes 2"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni runs one worker, not 2"),
        ({"distributed_executor_backend": "ray", "nnodes": 2}, "Ray knows its nodes itself"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "nnodes 2 with data_parallel_size 2"),
    ],
)
def test_contradictory_nodes_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        some_config(**settings)


def test_the_key_of_a_group_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    _, secret_file = write_pair(tmp_path, "group")
    keys = GroupKeys.read(str(secret_file))
    assert GroupKeys.of(None, secret_file.read_text()) == keys == GroupKeys.of(str(secret_file), "ignored")
    assert GroupKeys.of(None, None) is None
    with pytest.raises(ConfigError, match="OCTAVO_GROUP_SECRET_KEY holds no secret key"):
        GroupKeys.of(None, "anything")


def test_a_node_with_too_little_room_is_reported() -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=2)
    for position, capacity in ((0, 2), (1, 1), (5, 2)):
        agents._admit(msgspec.structs.replace(ready(str(position), "a", capacity), position=position))
    assert agents.place(0, 6) is None
    assert agents.missing(6) == "there are places for 5 of 6 workers; give octavo serve the same flags on all nodes"
    agents.close()


def test_the_latest_agent_of_a_position_is_used() -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    for agent, node in (("9", "z"), ("1", "a")):
        agents._admit(msgspec.structs.replace(ready(agent, node), position=0))
    placed = agents.place(0, 1)
    assert placed is not None and [node.name for node in placed] == ["a"]
    agents.close()


def test_a_node_0_that_cannot_start_its_agent_says_why(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "AGENT_MODULE", "octavo.worker_proc")  # which expects another launch spec
    spec = core_spec("ipc:///nowhere", tensor_parallel_size=2, nnodes=2, master_port=free_port)
    agents = LaunchedNodes(spec, "core_fake_worker")
    group = ready_group(agents, nnodes=2)
    try:
        with pytest.raises(StartupError, match="Invalid value 'agent'"):
            group.start(SilentReporter(), Signals())  # type: ignore[arg-type]
    finally:
        group.kill()


def test_a_node_waits_for_the_name_of_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = Agents("tcp://127.0.0.1:*", None, num_positions=1)
    own_host, names = agent_module.own_host, iter(["tcp://nowhere.invalid:1"])
    monkeypatch.setattr(agent_module, "own_host", lambda address: own_host(next(names, address)))
    node = Node(agents.address, 0)
    try:
        wait_until(lambda: agents.poll() or agents.place(0, 1), lambda: "the node")
    finally:
        agents.close()
        node.end()
    assert node.error is None
