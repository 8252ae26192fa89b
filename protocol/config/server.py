"""`ServerConfig`: what the user said about the HTTP server. Only the frontend reads it."""

from typing import Annotated

from msgspec import Meta, Struct


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of `octavo serve`."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free one.")] = 8000
    uds: Annotated[str | None, Meta(description="Unix domain socket to listen on instead of a port.")] = None
    api_key: Annotated[
        list[str] | None,
        Meta(description="Accepted API keys (repeatable); every route but /health and /ping needs one of them."),
    ] = None
    engine_address: Annotated[
        str | None, Meta(description="ipc:// address on which further applications may join this engine.")
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="Render chat templates that come with requests. They run in a sandbox, but one that never "
            "ends blocks every other text."
        ),
    ] = False
    enable_vllm_metrics: Annotated[bool, Meta(description="Offer the metrics under vllm: names as well.")] = False
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that running requests get to finish after the first Ctrl-C or SIGTERM."),
    ] = 30.0
    log_level: Annotated[
        str | None, Meta(description="DEBUG, INFO, WARNING or ERROR. Default: OCTAVO_LOG_LEVEL, else INFO.")
    ] = None
    disable_access_log: Annotated[bool, Meta(description="No log line per HTTP request.")] = True
