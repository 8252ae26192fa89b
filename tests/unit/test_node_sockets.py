"""The connections between nodes: only who knows the secret of the group gets one, not who repeats a recorded proof."""

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo.protocol.control import NodePlace
from octavo.protocol.curve import ClientKeys, GroupKeys, prepare_connection, prepare_listener
from octavo.worker_proc.parallel import node_sockets
from octavo.worker_proc.parallel.node_sockets import connect_nodes

TIMEOUT_S = 30.0
SECRET = "s" * 40


def places(listeners: list[socket.socket], secret: str = SECRET) -> list[NodePlace]:
    """Return the places of nodes that listen on copies of these sockets."""
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    return [
        NodePlace(
            node=node,
            first_ranks=list(range(len(listeners) + 1)),
            link_addresses=addresses,
            secret=secret,
            listener_fd=listener.dup().detach(),
        )
        for node, listener in enumerate(listeners)
    ]


def listening(count: int) -> list[socket.socket]:
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]


def close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def test_every_node_is_connected_to_every_other() -> None:
    listeners = listening(3)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(connect_nodes, place) for place in places(listeners)]
        connected = [future.result(TIMEOUT_S) for future in futures]
    for node, others in enumerate(connected):
        assert set(others) == {0, 1, 2} - {node}
        for other, connection in others.items():
            connection.sendall(bytes([node, other]))
    for node, others in enumerate(connected):
        assert all(connection.recv(2) == bytes([other, node]) for other, connection in others.items())
    for one in [*connected, dict(enumerate(listeners))]:
        close(one)


class Recorder:
    """Passes one connection on to another address, and keeps what the client sends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sent = b""
        self._target = target
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with self.listener, self.listener.accept()[0] as client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy_back, args=[server, client])
            back.start()
            while data := client.recv(4096):
                self.sent += data
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _copy_back(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(4096):
            client.sendall(data)


def test_a_recorded_proof_is_worth_nothing() -> None:
    listeners = listening(2)
    recorder = Recorder(listeners[0].getsockname())
    first, second = places(listeners)
    second.link_addresses[0] = recorder.address
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(connect_nodes, place) for place in (first, second)]
        for future in futures:
            close(future.result(TIMEOUT_S))
        recorder.thread.join()
        assert recorder.sent
        # The same group again, whose secret has not changed.
        first, second = places(listeners)
        waiting: Future[dict[int, socket.socket]] = threads.submit(connect_nodes, first)
        with socket.create_connection(listeners[0].getsockname()) as stranger:
            stranger.sendall(recorder.sent)
            received = b""
            while data := stranger.recv(4096):
                received += data
        assert len(received) == 32, "a challenge, and then the end"
        assert not waiting.done()
        genuine = threads.submit(connect_nodes, second)
        close(waiting.result(TIMEOUT_S))
        close(genuine.result(TIMEOUT_S))
    close(dict(enumerate(listeners)))


def test_a_stranger_that_says_nothing_holds_up_the_others_only_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sockets, "HANDSHAKE_S", 0.2)
    listeners = listening(2)
    strangers = [socket.create_connection(listeners[0].getsockname()) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(connect_nodes, place) for place in places(listeners)]
        for node, future in enumerate(futures):
            connections = future.result(TIMEOUT_S)
            assert list(connections) == [1 - node]
            close(connections)
    close(dict(enumerate([*listeners, *strangers])))


def test_a_listener_without_an_authenticator_admits_nobody() -> None:
    keys = GroupKeys.create()
    with zmq.Context() as context, context.socket(zmq.PULL) as listener, context.socket(zmq.PUSH) as stranger:
        prepare_listener(listener, "tcp://127.0.0.1:*", keys.server)
        listener.bind("tcp://127.0.0.1:*")
        address = listener.getsockopt_string(zmq.LAST_ENDPOINT)
        stranger.linger = 0
        public, secret = zmq.curve_keypair()
        prepare_connection(stranger, address, ClientKeys(public, secret, keys.client.public))
        with stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
            stranger.connect(address)
            assert monitor.poll(1000 * TIMEOUT_S)
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            stranger.disable_monitor()
