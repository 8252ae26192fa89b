"""`run_sibling`: a further HTTP process before an engine that its parent process runs, once its signals are in hand.

How it is started is in `sibling.py` and `siblings.py`.
"""

import asyncio
import signal
import socket
from pathlib import Path

import uvloop

from octavo.frontend.hosting import join_named
from octavo.frontend.http.run import make_server
from octavo.frontend.metrics.board import Board
from octavo.protocol.control import ServerReady, ServerSpec
from octavo.protocol.env import set_default
from octavo.protocol.lifecycle import Reporter, StopSignal


def run_sibling(spec: ServerSpec, reporter: Reporter, stop: StopSignal) -> bool:
    """Serve an engine that the parent process has started, until told to stop; False if the engine has died.

    Blocks until: the server has ended in good order.

    Args:
        spec: what the parent asked for.
        reporter: to the parent.
        stop: the signals so far.

    Raises:
        StartupError: the engine does not answer.
    """
    set_default("TOKENIZERS_PARALLELISM", "false")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_as_sibling(spec, reporter, stop))


async def _serve_as_sibling(spec: ServerSpec, reporter: Reporter, stop: StopSignal) -> bool:
    loop = asyncio.get_running_loop()
    # Who replaces a process that has died may come while the engine, too, is being replaced: that is no fault of ours.
    joining = asyncio.ensure_future(join_named(spec.address, spec.config))
    loop.add_signal_handler(signal.SIGTERM, joining.cancel)
    if stop.count:
        joining.cancel()
    try:
        client = await joining
    except asyncio.CancelledError:
        return True  # told to stop before there was anything to stop
    async with client:
        board = Board.attach(Path(spec.board_path), spec.row)
        server = make_server(client, spec.config, spec.config.api_key or [], board)
        loop.add_signal_handler(signal.SIGTERM, server.on_signal, signal.SIGTERM)
        reporter.mark_ready(ServerReady())
        await server.serve(sockets=[socket.socket(fileno=spec.listener_fd)])
    return server.failure is None
