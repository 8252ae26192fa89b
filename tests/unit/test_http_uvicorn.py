"""What our connection overrides and reads of uvicorn is not documented: an upgrade that changes it must fail here."""

import inspect
import re
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.frontend.http.http_protocol import HttpProtocol, _ThrottledFlow
from octavo.frontend.http.server import Server

OVERRIDDEN: list[tuple[type, type, str]] = [
    (
        HttpToolsProtocol,
        HttpProtocol,
        "connection_made data_received connection_lost shutdown pause_writing on_headers_complete on_body "
        "on_message_complete on_response_complete send_400_response timeout_keep_alive_handler _start_asgi_task",
    ),
    (FlowControl, _ThrottledFlow, "pause_reading resume_reading"),
    (uvicorn.Server, Server, "serve startup main_loop capture_signals"),
]


@pytest.mark.parametrize(("theirs", "ours", "names"), OVERRIDDEN, ids=lambda value: getattr(value, "__name__", ""))
def test_the_methods_that_we_override_are_those_of_uvicorn(theirs: type, ours: type, names: str) -> None:
    for name in names.split():
        assert name in vars(ours), f"{name} is not overridden any more"
        parameters = [list(inspect.signature(getattr(kind, name)).parameters) for kind in (theirs, ours)]
        assert parameters[0] == parameters[1], f"uvicorn {uvicorn.__version__} calls {name} differently"


def test_uvicorn_has_the_attributes_that_we_use() -> None:
    options: dict[str, Any] = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    connection = HttpToolsProtocol(uvicorn.Config(lambda: None, log_config=None), ServerState(), {}, _loop=object())  # type: ignore[arg-type]
    flow = FlowControl(None)  # type: ignore[arg-type]
    for owner, names in (
        (RequestResponseCycle(**options), "scope flow message_event disconnected keep_alive more_body"),
        (RequestResponseCycle(**options), "response_started response_complete run_asgi receive"),
        (connection, "config connections cycle flow headers logger loop parser scheme server_state tasks transport"),
        (connection, "timeout_keep_alive timeout_keep_alive_task _unset_keepalive_if_required"),
        (flow, "read_paused write_paused _transport"),
    ):
        missing = [name for name in names.split() if not hasattr(owner, name)]
        assert not missing, f"{type(owner).__name__} of uvicorn {uvicorn.__version__} has no {missing}"


def test_uvicorn_uses_of_a_message_event_what_ours_has() -> None:
    used = set(re.findall(r"message_event\.(\w+)", inspect.getsource(httptools_impl)))
    assert used == {"set", "clear", "wait"}
