"""`ServerConfig`: the user's settings for the HTTP server. Only the frontend reads it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of `octavo serve`."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free one.")] = 8000
    uds: Annotated[str | None, Meta(description="Unix domain socket to listen on instead of a port.")] = None
    api_server_count: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Number of HTTP processes. More than one pays off if text processing, not the model, "
            "saturates a core.",
            extra={"short": ("-asc",)},
        ),
    ] = 1
    root_path: Annotated[
        str | None,
        Meta(description="Path prefix of this server behind a proxy; requests may come with or without it."),
    ] = None
    api_key: Annotated[
        list[Annotated[str, Meta(min_length=1)]] | None,
        Meta(description="Accepted API keys (repeatable); every route but /health and /ping needs one of them."),
    ] = None
    admin_api_key: Annotated[
        list[Annotated[str, Meta(min_length=1)]] | None,
        Meta(
            description="Keys of operators (repeatable): enables the routes under /v1/engines, which need one of them. "
            "Default: OCTAVO_ADMIN_API_KEY, else these routes do not exist."
        ),
    ] = None
    tenants: Annotated[
        str | None,
        Meta(
            description="YAML file of tenants: names with keys, rates, token budgets, concurrency and priorities. It "
            "is read again when it changes. Their keys open only the API; --api-key is for keys without limits."
        ),
    ] = None
    enable_dev_routes: Annotated[
        bool,
        Meta(
            description="Serve /sleep, /wake_up, /pause, /resume, /update_weights and similar routes, with which "
            "every client can stop the server or replace its weights. VLLM_SERVER_DEV_MODE=1 does the "
            "same."
        ),
    ] = False
    ssl_keyfile: Annotated[str | None, Meta(description="Private key of the server (PEM); turns on TLS.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="Certificate chain of the server (PEM).")] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="CA certificates (PEM) for verifying client certificates.")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(ge=0, le=2, description="Client certificates: 0 not requested, 1 verified if present, 2 required."),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="Ciphers of TLS 1.2 in OpenSSL's notation. Default: OpenSSL's own.")
    ] = None
    enable_ssl_refresh: Annotated[bool, Meta(description="Reload certificate and key when their files change.")] = False
    allowed_origins: Annotated[
        list[str] | None,
        Meta(description="Origins of web pages that may read responses (CORS); [] for none. Default: *, all."),
    ] = None
    allowed_methods: Annotated[
        list[str] | None, Meta(description="Methods that such pages may use. Default: *, all.")
    ] = None
    allowed_headers: Annotated[
        list[str] | None, Meta(description="Request headers that such pages may send. Default: *, all.")
    ] = None
    middleware: Annotated[
        list[str] | None,
        Meta(
            description="ASGI middleware around the application, by name: module.Class, or module.function of a "
            "coroutine function with request and call_next. The last one is outermost; its code is run."
        ),
    ] = None
    allow_credentials: Annotated[
        bool, Meta(description="Allow such pages to send cookies and HTTP authentication.")
    ] = False
    max_request_body_bytes: Annotated[
        int, Meta(ge=1, description="Longest request body (16M); longer ones are rejected with 413.")
    ] = 16 * 2**20
    max_request_head_bytes: Annotated[
        int,
        Meta(
            ge=256,
            description="Longest request line with headers; longer ones are rejected with 431.",
            extra={"aliases": ("h11_max_incomplete_event_size",)},
        ),
    ] = 64 * 2**10
    max_n_sequences: Annotated[
        int, Meta(ge=1, description="Most sequences per request: n times the number of prompts.")
    ] = 16384
    max_stop_strings: Annotated[int, Meta(ge=0, le=64, description="Most stop strings per request.")] = 64
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without output after which a stream sends a comment, so that proxies do not close "
            "it; 0: never.",
        ),
    ] = 30.0
    enable_force_include_usage: Annotated[
        bool, Meta(description="Include usage in all chunks of streams, even if stream_options does not request it.")
    ] = False
    enable_per_request_metrics: Annotated[
        bool, Meta(description="Report the request's times in the engine under metrics, in responses with one choice.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="Write tokens in logprobs as token_id:ID, unless a request says otherwise.")
    ] = False
    fingerprint_mode: Annotated[
        Literal["full", "hash", "custom", "none"],
        Meta(
            description="The system_fingerprint of responses. full: octavo-VERSION-HASH, with the number of workers if "
            "there are several; hash: without it; custom: --fingerprint-value; none: null. HASH covers everything "
            "besides the request that tokens depend on."
        ),
    ] = "full"
    fingerprint_value: Annotated[str | None, Meta(description="The fingerprint, under --fingerprint-mode custom.")] = (
        None
    )
    lora_modules: Annotated[
        list[str] | None,
        Meta(
            description="LoRA adapters that requests choose as their model: NAME=DIRECTORY or NAME=HUB_ID, or JSON "
            "with name, path and base_model_name; needs --enable-lora."
        ),
    ] = None
    lora_resolver_dir: Annotated[
        str | None,
        Meta(
            description="Directory of LoRA adapters: a request whose model is the name of one loads it. Default: "
            "VLLM_LORA_RESOLVER_CACHE_DIR."
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        Meta(
            description="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, whose callers name directories of "
            "this machine, or hub ids. VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 means the same."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="Serve /tokenizer_info: the tokenizer's settings and the chat template.")
    ] = False
    enable_request_id_headers: Annotated[
        bool, Meta(description="Add an X-Request-Id header to every response: the client's own, or a new one.")
    ] = True
    torch_profiler_dir: Annotated[
        str | None,
        Meta(description="Directory for the traces of /start_profile and /stop_profile; enables these routes."),
    ] = None
    engine_address: Annotated[
        str | None,
        Meta(
            description="ipc:// or tcp:// address on which other applications may join this engine; of several engines "
            "the others have the next ports, or .1, .2, ... at the end. An address "
            "reachable from other machines needs --engine-secret-key-file and --engine-authorized-clients."
        ),
    ] = None
    join: Annotated[
        list[Annotated[str, Meta(min_length=1)]] | None,
        Meta(
            description="Serve HTTP for a running engine instead of starting one: the address is its --engine-address. "
            "MODEL and engine flags are given there. Engines of one model are separated by commas; several addresses "
            "are several models, and a request goes to the one that it names. An engine on another machine needs the "
            "next two flags."
        ),
    ] = None
    client_secret_key_file: Annotated[
        str | None, Meta(description="Secret key with which this server joins an engine, created by octavo keygen.")
    ] = None
    engine_public_key_file: Annotated[
        str | None, Meta(description="Public key of the engine that this server joins.")
    ] = None
    headless: Annotated[
        bool,
        Meta(
            description="Serve no HTTP: run the engine for applications that join it at --engine-address, and finish "
            "their requests after the first Ctrl-C or SIGTERM."
        ),
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="Accept chat templates in requests; each is rendered in a sandboxed process with limits on "
            "time and memory."
        ),
    ] = False
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="Form in which the chat template receives message content: string, openai (a list of parts), "
            "or auto, detected from the template."
        ),
    ] = "auto"
    response_role: Annotated[
        str, Meta(min_length=1, description="Role of generated messages, if the request adds a generation prompt.")
    ] = "assistant"
    default_chat_template_kwargs: Annotated[
        str | None,
        Meta(
            description='Variables of the chat template as a JSON object, such as {"enable_thinking": false}; '
            "chat_template_kwargs of a request take precedence."
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="Let the model decide when to call tools; needs --tool-call-parser.")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="How the model writes tool calls: hermes, llama3_json, mistral, pythonic, qwen3_coder, another "
            "name in docs/tool-calling.md, or what the plugin registers; auto: what the chat template writes."
        ),
    ] = None
    tool_parser_plugin: Annotated[
        str | None, Meta(description="Python file that registers further tool parsers; its code is run.")
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="Leave the tools out of the prompt under tool_choice none.")
    ] = False
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="How the model marks its reasoning; docs/reasoning.md lists the names. Default: everything is "
            "content."
        ),
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None, Meta(description="Python file that registers further reasoning parsers; its code is run.")
    ] = None
    enable_vllm_metrics: Annotated[bool, Meta(description="Also export the metrics under vllm: names.")] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="Serve neither /openapi.json nor /docs.")] = False
    watchdog_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a completed step after which an engine with work counts as hung: /health "
            "returns 503, and the stacks of all processes are logged once.",
        ),
    ] = 25.0
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds for running requests to finish after the first Ctrl-C or SIGTERM."),
    ] = 30.0
    log_level: Annotated[
        str | None,
        Meta(
            description="DEBUG, INFO, WARNING or ERROR. Default: OCTAVO_LOG_LEVEL, else VLLM_LOGGING_LEVEL, else INFO.",
            extra={"aliases": ("uvicorn_log_level",)},
        ),
    ] = None
    log_config_file: Annotated[
        str | None,
        Meta(
            description="JSON file for Python's logging.config.dictConfig, used by all processes. Default: lines on "
            "standard error."
        ),
    ] = None
    disable_access_log: Annotated[
        bool,
        Meta(description="Write no log line per HTTP request.", extra={"aliases": ("disable_uvicorn_access_log",)}),
    ] = True
    disable_access_log_for_endpoints: Annotated[
        list[str] | None,
        Meta(description="Paths without access log lines, as words or as one list with commas: /health,/metrics."),
    ] = None
    access_log_file: Annotated[
        str | None,
        Meta(
            description="File to which each HTTP request appends a JSON object with status, times and token counts, "
            "but no text; -: standard output. It may be rotated. Paths of "
            "--disable-access-log-for-endpoints are omitted."
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="URL of an OpenTelemetry collector that receives the spans of requests; needs octavo[otel]. "
            "Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else no traces."
        ),
    ] = None
    custom_histogram_buckets: Annotated[
        str | None,
        Meta(
            description="Upper edges of the buckets of histograms in /metrics, as a JSON object: "
            '{"time_to_first_token_seconds": [0.1, 0.5, 2]}. Default: those of vLLM.'
        ),
    ] = None
    enable_log_requests: Annotated[bool, Meta(description="Log the prompt and the parameters of every request.")] = (
        False
    )
    enable_log_outputs: Annotated[bool, Meta(description="Log the text of every response when it is complete.")] = False
    enable_log_deltas: Annotated[
        bool, Meta(description="With --enable-log-outputs: also log each delta of a stream.")
    ] = False
    log_error_stack: Annotated[bool, Meta(description="Log the stack trace of every error response.")] = False
    response_store: Annotated[
        str | None,
        Meta(
            description="SQLite database for objects that the Responses API stores, which then survive a restart. It "
            "contains the texts of conversations. Default: memory shared by the server's processes."
        ),
    ] = None
    batch_dir: Annotated[
        str | None,
        Meta(
            description="Directory for files and batches (/v1/files, /v1/batches), which survive a restart. It "
            "contains the texts of all their requests, and only this user may read it. Default: none; "
            "these routes are off."
        ),
    ] = None
    batch_dir_max_bytes: Annotated[
        int, Meta(ge=2**20, description="Size of that directory (10G); uploads beyond it are rejected.")
    ] = 10 * 2**30
    receipts: Annotated[
        str | None,
        Meta(
            description="Directory for a log of receipts: each request with its seeds, its tokens and digests of "
            "logprobs, which octavo verify recomputes and compares. All requests compute logprobs. It "
            "contains the texts of all requests, and only this user may read it."
        ),
    ] = None
    receipts_max_bytes: Annotated[
        int, Meta(ge=2**20, description="Size of that log (1G); its oldest files are removed.")
    ] = 2**30
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Most characters of a text, and most token ids, in a request log line. Default: all."),
    ] = None
