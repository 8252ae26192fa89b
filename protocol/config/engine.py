"""`EngineConfig`: the user's settings, in sections. The sections of the model and of some features are in separate
files."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from octavo.protocol.code import ProcessorSource
from octavo.protocol.config.lora import LoRAConfig
from octavo.protocol.config.media import MediaConfig
from octavo.protocol.config.model import ModelConfig
from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.config.speculation import SpeculationConfig

KVCacheDtypeName: TypeAlias = Literal["bfloat16", "float16", "float32", "int8", "fp8"]
KVCacheDtypeChoice: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
DeviceName: TypeAlias = Literal["cpu", "cuda"]
KernelChoice: TypeAlias = Literal["auto", "native", "torch"]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache memory."""

    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens per KV block.")] = 16
    kv_cache_dtype: Annotated[
        KVCacheDtypeChoice,
        Meta(
            description="Data type of the KV cache: auto (that of --dtype, or fp8 if the checkpoint has scales for "
            "it), int8, or fp8 (fp8_e4m3; on GPUs from Ada on). fp8_e5m2 is rejected."
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Meta(
            description="Measure the scales of an fp8 cache at start-up, with a fixed prompt. Default: the scales of "
            "the checkpoint, or 1."
        ),
    ] = False
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Fraction of the device's memory to use; on a CPU, of the free memory.",
            extra={"aliases": ("device_memory_utilization",)},
        ),
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(description="Size of the KV cache (4G, 512M). Default: computed from the memory, on a CPU at most 4 GiB."),
    ] = None
    num_gpu_blocks_override: Annotated[
        Positive | None, Meta(description="Number of KV blocks. Default: computed from the memory.")
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt prefixes.")] = True
    kv_offloading_size: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(
            description="Host memory for evicted KV blocks, in GiB for all workers together. Later requests with the "
            "same prefix find the blocks there. 0: none."
        ),
    ] = 0.0
    swap_space: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(description="The same as --kv-offloading-size, in GiB of each worker. Only one of the two may be given."),
    ] = 0.0
    kv_transfer_config: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description="JSON with vLLM's names: send KV blocks of requests to other engines, or receive them: "
            '{"kv_connector": "OctavoConnector", "kv_role": "kv_both"}. docs/disaggregation.md lists the '
            "fields."
        ),
    ] = None
    kv_offloading_path: Annotated[
        str | None,
        Meta(
            description="Directory for files of all full KV blocks and of recurrent states. They survive restarts, and "
            "engines of one machine share them. Default: none."
        ),
    ] = None
    kv_offloading_disk_size: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(
            description="Size limit in GiB for all files under --kv-offloading-path; the least recently used ones are "
            "deleted."
        ),
    ] = 32.0
    kv_offloading_recompute: Annotated[
        bool, Meta(description="Recompute offloaded blocks when that is faster than copying them.")
    ] = True


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a step, and the order in which requests are scheduled."""

    max_num_seqs: Annotated[Positive | None, Meta(description="Most requests in one step. Default: 256.")] = None
    max_num_batched_tokens: Annotated[
        Positive | None, Meta(description="Token budget of one step. Default: 512 on a CPU, 8192 on a GPU.")
    ] = None
    full_step_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of tokens at which a step is large enough to be efficient. Further short prompts wait "
            "for the next step, and the next step is not planned ahead. 0: no limit. Default: 64 per "
            "thread on a CPU, 0 on a GPU.",
        ),
    ] = None
    decode_interval_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Decodes may be delayed in favor of prompts that the step can complete, for at most this many "
            "prompt tokens. 0: every step decodes. Default: 512 per thread on a CPU, 0 on a GPU.",
        ),
    ] = None
    step_time_target: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Target duration of a step in seconds. The number of prompt tokens per step follows from the "
            "measured time per token, so that a long prompt delays running streams and short prompts no "
            "longer than this. 0: no target, for the highest throughput. Default: 0.15 on a CPU, 0 on a "
            "GPU and in offline batches (LLM).",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Most tokens of one prompt per step; 0: limited only by its fair share.")
    ] = 0
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(
            description="fcfs: in order of arrival; priority: lower `priority` first. At most 10,000 later requests "
            "per level of priority can overtake a request, so that no request starves."
        ),
    ] = "fcfs"
    async_scheduling: Annotated[
        bool, Meta(description="Plan the next step while the current one is computed. Does not change the tokens.")
    ] = True
    num_scheduler_steps: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="Most decode steps that are planned together while no request waits, limited to 40 ms. A "
            "stream then gets several tokens at a time. A new request ends such a plan after the present step. With "
            "several workers or recurrent states it waits for the last step, and the limit is 20 ms. Does not change "
            "the tokens. 1: each step is planned separately. Default: 8 on a CPU; 1 on a GPU, and with pipeline "
            "stages, speculation, logits processors, experts shared by several engines, or a pooling model.",
        ),
    ] = None
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens per message of a stream. The first token is sent at once. Larger messages cost less "
            "CPU time. Ignored for requests with stop strings.",
        ),
    ] = 1
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=0,
            description="Most waiting requests; more are rejected with 503. 0: no limit.",
            extra={"aliases": ("max_num_queued_requests",)},
        ),
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most prompt tokens of all waiting requests; a request that would exceed this is rejected "
            "with 503, unless the queue is empty. 0: no limit.",
        ),
    ] = 16_777_216


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto: cuda if there is an NVIDIA GPU and torch supports it, else cpu."),
    ] = "auto"
    enforce_eager: Annotated[bool, Meta(description="Run steps on a GPU without CUDA graphs.")] = False
    max_cudagraph_capture_size: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Largest decode step, in requests, that has its own CUDA graph. Larger ones use the graphs "
            "for steps with prompts, which have up to 2,048 tokens. 0: no graphs. Default: "
            "--max-num-seqs, at most 512."
        ),
    ] = None
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="Use batch-invariant matrix products on a GPU, so that a request's tokens do not depend on "
            "the rest of its batch. Products are faster without it. On a CPU they are always "
            "batch-invariant."
        ),
    ] = True
    num_threads: Annotated[
        Positive | None,
        Meta(
            description="Most compute threads of each CPU worker; a step uses fewer while other processes need the "
            "cores. Default: one per usable core, divided among the workers of all engines."
        ),
    ] = None
    cpu_kernels: Annotated[
        KernelChoice,
        Meta(
            description="native: C++ kernels, compiled at the first start; torch: torch's operations; auto: native if "
            "there is a compiler, and always on several nodes."
        ),
    ] = "auto"
    cpu_binding: Annotated[
        str,
        Meta(
            description="Bind compute threads to cores: compact (cores of one NUMA node first), a list such as 0-3,8, "
            "or none."
        ),
    ] = "none"


class StructuredConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output: limits on grammars and schemas, and the format of JSON."""

    max_grammar_bytes: Annotated[
        int, Meta(ge=1, description="Longest grammar or schema of a request (512K); longer ones are rejected.")
    ] = 512 * 2**10
    grammar_timeout: Annotated[
        int,
        Meta(ge=1, le=3600, description="CPU seconds for compiling a grammar; slower ones are rejected."),
    ] = 5
    structured_outputs_config: Annotated[
        str | None,
        Meta(
            description='vLLM\'s settings as JSON. {"disable_any_whitespace": true, "disable_additional_properties": '
            "true} become the defaults of requests that do not set them."
        ),
    ] = None


class RecoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when a process of the engine crashes or hangs."""

    restart_core: Annotated[
        bool,
        Meta(
            description="Restart the core when it crashes and continue its requests. Without this the engine exits "
            "with its core."
        ),
    ] = True
    core_timeout: Annotated[
        int,
        Meta(
            ge=0,
            description="Seconds without a heartbeat after which a core that has work or owes a reply is killed and "
            "restarted; 0: never.",
        ),
    ] = 30
    execute_model_timeout: Annotated[
        float,
        Meta(gt=0, description="Time limit in seconds for a step; slower workers are killed and restarted."),
    ] = 300.0
    max_worker_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="Number of consecutive worker restarts without a completed step after which the core exits. "
            "0: it exits with its workers.",
        ),
    ] = 8


class ObserveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, metrics and recordings of the engine."""

    disable_log_stats: Annotated[bool, Meta(description="Write no throughput line every 10 s.")] = False
    record_steps: Annotated[
        str | None,
        Meta(
            description="Record the core's inputs and plans in this file, for scripts/replay. A restarted core writes "
            "a separate file: FILE.2 and so on. Additional engines do too: FILE.engine1 and so on."
        ),
    ] = None
    kv_events_config: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description="JSON: where to publish changes of the prefix cache, in vLLM's format: "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}.'
        ),
    ] = None


class RemoteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Applications on other machines that join this engine."""

    engine_secret_key_file: Annotated[
        str | None,
        Meta(description="Secret key of an engine with a tcp:// address, created by octavo keygen."),
    ] = None
    engine_authorized_clients: Annotated[
        str | None,
        Meta(description="Directory with the public keys (*.key) of clients that may join by tcp, or one such file."),
    ] = None


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's settings for the engine. None means: choose for me."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    processor_code: list[ProcessorSource] = []
    """Logits processors that the application has passed as code. Not a setting: it has no flag and no key in files."""
