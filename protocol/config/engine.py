"""`EngineConfig`: what the user said about model, memory, scheduling and device."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from octavo.protocol.params import LogprobsMode

LoadFormat: TypeAlias = Literal["auto", "hf", "safetensors", "gguf", "dummy"]
TokenizerMode: TypeAlias = Literal["auto", "hf", "fast", "slow", "mistral"]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]
DtypeChoice: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
QuantizationName: TypeAlias = Literal["none", "int8", "int4", "gguf"]
KVCacheDtypeName: TypeAlias = Literal["bfloat16", "float16", "float32", "int8", "fp8"]
KVCacheDtypeChoice: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
DeviceName: TypeAlias = Literal["cpu", "cuda"]
KernelChoice: TypeAlias = Literal["auto", "native", "torch"]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights and texts are read."""

    model: Annotated[str, Meta(description="Directory in Hugging Face layout, a .gguf file, or a hub id (org/name).")]
    tokenizer: Annotated[
        str | None, Meta(description="Directory or hub id of the tokenizer. Default: the model's own.")
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit on the hub.")] = None
    tokenizer_revision: Annotated[str | None, Meta(description="Branch, tag or commit of --tokenizer on the hub.")] = (
        None
    )
    tokenizer_mode: Annotated[
        TokenizerMode,
        Meta(
            description="Which of its files is read. auto, hf, fast: tokenizer.json, else older ones (under auto "
            "tekken.json first); slow: those that tokenizer.json was made from; mistral: tekken.json."
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool,
        Meta(
            description="Load no tokenizer: prompts are token ids, and so are answers (return_token_ids). What needs "
            "text is refused: texts as prompts, chat, stop strings, bad_words, structured output, echo."
        ),
    ] = False
    hf_token: Annotated[
        str | None, Meta(description="Access token of the hub. Default: that of `hf auth login`, or HF_TOKEN.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Directory for what is downloaded from the hub. Default: the hub's own cache.")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | str | None,
        Meta(description='Members of config.json as JSON that take the place of the model\'s, {"rope_theta": 1e6}.'),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        Meta(description="Names the API answers to; the first is reported. Default: MODEL."),
    ] = None
    load_format: Annotated[
        LoadFormat,
        Meta(description="How weights are stored (hf means auto); dummy makes random ones without reading any."),
    ] = "auto"
    dtype: Annotated[
        DtypeChoice,
        Meta(description="Type of weights and activations. auto: the checkpoint's, float32 as bfloat16."),
    ] = "auto"
    quantization: Annotated[
        QuantizationName | None,
        Meta(
            description="How linear layers hold their weights. int8, int4: quantized while loading, in groups of 32; "
            "gguf: as a GGUF file has them; none: in --dtype. Default: gguf for a quantized GGUF file, unless --dtype "
            "is float32; else none.",
            extra={"short": ("-q",)},
        ),
    ] = None
    packed_weights_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most bytes on disk, in the cache directory, for weights in the form that is computed with, "
            "which a later start maps instead of loading the model again (16G, 512M); 0: keep none.",
        ),
    ] = 16 * 2**30
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        Meta(
            description="Longest prompt plus output, in tokens (32k = 32 000, 32K = 32 768). Default: the model's own; "
            "auto: the longest that fits in memory."
        ),
    ] = None
    seed: Annotated[int, Meta(description="Seed for dummy weights and for requests without a seed.")] = 0
    max_logprobs: Annotated[
        int, Meta(ge=-1, description="Most logprobs a request may ask for; -1 lifts the limit.")
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="What is reported as a token's logprob: its log-probability or its logit, raw as the model "
            "gives it or processed by biases, penalties, temperature and filters. Prompt tokens' are never processed."
        ),
    ] = "raw_logprobs"
    generation_config: Annotated[
        str,
        Meta(
            description="Where default sampling parameters come from: auto (the model's generation_config.json), "
            "vllm (none) or a directory."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | str | None,
        Meta(description='Members of it as JSON that take the place of what is there, such as {"temperature": 0.5}.'),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="Jinja chat template: a file, or the text itself. Default: the model's own."),
    ] = None


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache memory."""

    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens per KV block.")] = 16
    kv_cache_dtype: Annotated[
        KVCacheDtypeChoice,
        Meta(
            description="Type of keys and values in the cache: the model's --dtype, which auto means, int8 on a CPU, "
            "or fp8 (fp8_e4m3) on a GPU since Ada."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the device's memory to use; on the CPU, of the free memory.",
            extra={"aliases": ("device_memory_utilization",)},
        ),
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="Bytes for the KV cache (4G, 512M); replaces the memory arithmetic, which on a CPU takes "
            "4 GiB at most."
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        Positive | None, Meta(description="Number of KV blocks; replaces the memory arithmetic.")
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt prefixes.")] = True


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one step may hold, and in which order requests enter it."""

    max_num_seqs: Annotated[
        Positive | None, Meta(description="Most requests in one step. Default: 64 on a CPU, 256 on a GPU.")
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None, Meta(description="Token budget of one step. Default: 512 on a CPU, 8192 on a GPU.")
    ] = None
    full_step_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Tokens at which a step is large enough to be efficient: short prompts wait for the next one "
            "rather than make it larger, and none is planned ahead of it. 0: no limit. Default: 64 for each thread on "
            "a CPU, 0 on a GPU.",
        ),
    ] = None
    decode_interval_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Decodes give way to prompts that a step can finish, until so many tokens of prompts are "
            "computed. 0: they are in every step. Default: 512 for each thread on a CPU, 0 on a GPU.",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Most tokens of one prompt in one step; 0: no limit but the fair share.")
    ] = 0
    scheduling_policy: Annotated[
        SchedulingPolicy, Meta(description="fcfs: in order of arrival; priority: lower `priority` first.")
    ] = "fcfs"
    async_scheduling: Annotated[
        bool, Meta(description="Plan a step while the one before is computed. The tokens are the same.")
    ] = True
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens that a stream sends together, after the first, which it sends at once. More cost less; "
            "requests with stop strings ignore it.",
        ),
    ] = 1
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=0,
            description="Most requests that may wait; above it a request is refused with 503. 0: no limit.",
            extra={"aliases": ("max_num_queued_requests",)},
        ),
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most prompt tokens that may wait; a request that would add more to others that wait is "
            "refused with 503. 0: no limit.",
        ),
    ] = 0


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers, and what each holds."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that share every layer.", extra={"short": ("-tp",)})
    ] = 1


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto: cuda where there is an NVIDIA GPU and torch is built for it, else cpu."),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Meta(description="On a GPU, launch the kernels of every decode one by one instead of as a CUDA graph.")
    ] = False
    max_cudagraph_capture_size: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Most requests of a decode that is run as a CUDA graph; larger ones are launched kernel by "
            "kernel. Default: --max-num-seqs, 512 at most."
        ),
    ] = None
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="On a GPU, compute products so that a request's tokens do not depend on the others of its "
            "batch, as they never do on a CPU; without it products are faster."
        ),
    ] = True
    num_threads: Annotated[
        Positive | None,
        Meta(
            description="Most compute threads of a CPU worker; a step takes fewer while other processes need the "
            "cores. Default: the cores it may use."
        ),
    ] = None
    cpu_kernels: Annotated[
        KernelChoice,
        Meta(
            description="native: C++ kernels, compiled at the first start; torch: torch's operations; auto: native "
            "where there is a compiler."
        ),
    ] = "auto"
    cpu_binding: Annotated[
        str,
        Meta(
            description="Bind each compute thread to a core: compact (those of one NUMA node first), a list such as "
            "0-3,8, or none."
        ),
    ] = "none"


class StructuredConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output: what grammars and schemas of requests may cost, and how JSON is written."""

    max_grammar_bytes: Annotated[
        int, Meta(ge=1, description="Longest grammar or schema of a request (512K); a longer one is refused.")
    ] = 512 * 2**10
    grammar_timeout: Annotated[
        int,
        Meta(ge=1, le=3600, description="Seconds of processor time that compiling one may take, before it is refused."),
    ] = 5
    structured_outputs_config: Annotated[
        str | None,
        Meta(
            description='vLLM\'s settings as JSON, of which {"disable_any_whitespace": true, '
            '"disable_additional_properties": true} change what requests get that say nothing of it.'
        ),
    ] = None


class RecoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when a process of the engine dies or hangs."""

    restart_core: Annotated[
        bool,
        Meta(
            description="Start the core again when it dies, and go on with its requests; otherwise its death is the "
            "engine's."
        ),
    ] = True
    core_timeout: Annotated[
        int,
        Meta(
            ge=0,
            description="Seconds after which a core that has work, or owes an answer, and says nothing is killed and "
            "started again; 0: never.",
        ),
    ] = 30
    execute_model_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds that a step may take. Workers that need longer are killed and started again."),
    ] = 300.0
    max_worker_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="Restarts of the workers in a row, without a step in between, after which the core ends. 0: it "
            "ends with its workers.",
        ),
    ] = 8


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, metrics and recordings of the engine."""

    disable_log_stats: Annotated[bool, Meta(description="No throughput line every 10 s.")] = False
    record_steps: Annotated[
        str | None,
        Meta(
            description="File to record the core's inputs and plans in, for scripts/replay; a core that is started "
            "again has one of its own: FILE.2 and so on."
        ),
    ] = None


class RemoteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Applications on other machines that join this engine."""

    engine_secret_key_file: Annotated[
        str | None,
        Meta(description="Secret key of an engine with a tcp:// address, made by octavo keygen."),
    ] = None
    engine_authorized_clients: Annotated[
        str | None,
        Meta(description="Directory with the public keys (*.key) of those who may join by tcp, or the file of one."),
    ] = None


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the user said about the engine; None means: choose for me."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
