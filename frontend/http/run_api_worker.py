"""`run_api_worker`: an additional HTTP process for an engine that the parent process runs.

`api_worker.py` calls it after installing the signal handlers; `api_workers.py` is the parent's side.
"""

import asyncio
import signal
import socket
from functools import partial
from pathlib import Path

import uvloop

from octavo.frontend.calls.services import USAGE_FILE, CallServices
from octavo.frontend.hosting import join_entry
from octavo.frontend.http.configure import make_app_state, with_shared_responses
from octavo.frontend.http.run import make_server
from octavo.frontend.lora.registry import FILE_NAME as ADAPTERS_FILE
from octavo.frontend.membership.follower import Follower
from octavo.frontend.metrics.shared_counters import SharedCounters
from octavo.protocol.control import ServerReady, ServerSpec
from octavo.protocol.env import set_default
from octavo.protocol.lifecycle import StartupReporter, StopSignal


def run_api_worker(spec: ServerSpec, reporter: StartupReporter, stop: StopSignal) -> bool:
    """Serve an engine that the parent started, until asked to stop; return False if the engine died.

    Blocks until: the server has shut down.

    Args:
        spec: the configuration from the parent.
        reporter: reports readiness to the parent.
        stop: the stop signals received so far.

    Raises:
        StartupError: the engine does not respond.
    """
    set_default("TOKENIZERS_PARALLELISM", "false")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_as_api_worker(spec, reporter, stop))


async def _serve_as_api_worker(spec: ServerSpec, reporter: StartupReporter, stop: StopSignal) -> bool:
    loop = asyncio.get_running_loop()
    # A replacement process may start while the engine restarts, so connecting may take long and can be cancelled.
    follower = await Follower.connect(spec.address, partial(join_entry, config=spec.config))
    joining = asyncio.ensure_future(follower.client())
    loop.add_signal_handler(signal.SIGTERM, joining.cancel)
    if stop.count:
        joining.cancel()
    try:
        client = await joining
    except asyncio.CancelledError:
        await follower.close()
        return True  # it was stopped before it had connected
    async with client, follower:
        directory = Path(spec.address).parent
        client.adapters.share(directory / ADAPTERS_FILE)
        counters = SharedCounters.attach(Path(spec.counters_path), spec.row)
        config = with_shared_responses(spec.config, directory)
        calls = CallServices.open(config, client.config, directory / USAGE_FILE, spec.row)
        state = make_app_state(client, config, counters, follower.execute)
        server = make_server([state], config, config.api_key or [], calls)
        loop.add_signal_handler(signal.SIGTERM, server.on_signal, signal.SIGTERM)
        reporter.mark_ready(ServerReady())
        try:
            await server.serve(sockets=[socket.socket(fileno=spec.listener_fd)])
        finally:
            state.responses.close()
            calls.close()
    return server.failure is None
