"""`resolve()`: from the user's settings and the model's facts to a configuration with nothing left open."""

from typing import Literal

import msgspec

from octavo.protocol.code import ProcessorSource
from octavo.protocol.config.cache_dtype import require_native, resolve_kv_cache_dtype
from octavo.protocol.config.division import check_division, has_experts
from octavo.protocol.config.engine import (
    DeviceName,
    EngineConfig,
    KernelChoice,
    KVCacheDtypeName,
    SchedulingPolicy,
)
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.kv_connectors import use_own_settings
from octavo.protocol.config.kv_events import KVEventsConfig, read_kv_events
from octavo.protocol.config.kv_transfer import (
    ResolvedKVConnector,
    ResolvedKVTransfer,
    check_kv_transfer,
    read_kv_connector,
    read_kv_transfer,
)
from octavo.protocol.config.lock_step import check_lock_step
from octavo.protocol.config.lora import ResolvedLoRA, resolve_lora
from octavo.protocol.config.media import ResolvedMedia, resolve_media
from octavo.protocol.config.model import DtypeName, QuantizationName
from octavo.protocol.config.nodes import check_nodes
from octavo.protocol.config.offloading import BLOCK_MULTIPLE, offloading_bytes, offloading_path
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.config.prompt_embeds import embedding_bytes, takes_prompt_embeds
from octavo.protocol.config.speculation import ResolvedSpeculation, check_head_engine, resolve_speculation
from octavo.protocol.config.stages import resolve_stages
from octavo.protocol.config.step_limits import resolve_scheduler_steps, resolve_step_limits
from octavo.protocol.config.structured_outputs import resolve_structured_outputs
from octavo.protocol.config.threads import CoreBinding, resolve_threads
from octavo.protocol.config.tp_invariance import check_tp_invariance
from octavo.protocol.config.weight_format import resolve_dtype, resolve_quantization
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import LogprobsMode


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs. No field means "choose for me", but `fits_model_len` leaves the length to the memory."""

    model: ModelFacts
    served_model_names: list[str]
    dtype: DtypeName
    quantization: QuantizationName
    """"gguf": as in the file."""
    packed_weights_cache_bytes: int
    """0: packed weights are not kept."""
    device: DeviceName
    num_threads: int
    """Most compute threads of each CPU worker."""
    cpu_kernels: KernelChoice
    cpu_binding: CoreBinding
    max_graph_size: int
    """Most requests of a decode that has a CUDA graph of its own; 0: there are no graphs."""
    is_batch_invariant: bool
    """The products of a GPU give a row the same bits in any batch; those of a CPU always do."""
    seed: int
    max_model_len: int
    """The limit, unless `fits_model_len`."""
    fits_model_len: bool
    """`--max-model-len auto`: the core lowers `max_model_len` to what fits in memory."""
    max_logprobs: int
    """-1: no limit."""
    logprobs_mode: LogprobsMode
    logits_processors: list[ProcessorSource]
    block_size: int
    kv_cache_dtype: KVCacheDtypeName
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    """None: computed from the memory that is there."""
    num_blocks_override: int | None
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    full_step_tokens: int
    """0: no step is full."""
    decode_interval_tokens: int
    """0: decodes are in every step."""
    step_time_target_s: float
    """0: no target."""
    long_prefill_token_threshold: int
    """0: no limit."""
    scheduling_policy: SchedulingPolicy
    async_scheduling: bool
    stream_interval: int
    """Tokens."""
    max_num_queued_reqs: int
    """0: no limit."""
    max_num_queued_tokens: int
    """Of prompts; 0: no limit."""
    max_grammar_bytes: int
    grammar_timeout_s: int
    """Of processor time."""
    disable_any_whitespace: bool
    """In the JSON of all requests."""
    disable_additional_properties: bool
    """In the schemas of all requests."""
    restart_core: bool
    core_timeout_s: int
    """0: no limit."""
    execute_model_timeout_s: float
    max_worker_restarts: int
    world_size: int
    """Workers: of all stages."""
    pipeline_parallel_size: int = 1
    """Stages."""
    stage_layers: list[int] = []
    """Layers of each stage; []: they are divided by the size of their weights."""
    calculate_kv_scales: bool = False
    """Workers measure the scales of keys and values in the cache when they start."""
    enable_tp_invariant_inference: bool = False
    """A request's bits must not depend on the number of workers that share the layers."""
    enable_expert_parallel: bool = False
    """The workers of all engines divide the experts of a mixture, not the columns of each."""
    data_parallel_size: int = 1
    """Engines that share the requests, all on this machine."""
    engine_index: int = 0
    """Of this engine among them."""
    engine_place: int = 0
    """Which of the machine's GPUs and cores the engine takes: those after the engines of lower places. An engine that
    replaces another one has its place."""
    executor: Literal["mp", "ray"] = "mp"
    """What starts the workers."""
    model_name: str = ""
    """`--model` as the user has written it: a path or a hub id."""
    num_nodes: int = 1
    """Machines that an outside launcher has started; 1: only this one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    group_secret_key_file: str | None = None
    """None: all nodes are on this machine."""
    log_stats: bool
    record_steps: str | None
    kv_events: KVEventsConfig | None = None
    """None: nothing is published."""
    engine_secret_key_file: str | None
    """None: the engine has no keys, and no address that other machines can reach."""
    engine_authorized_clients: str | None
    chat_template: str | None
    """Given on the command line; None: the model's own."""
    lora: ResolvedLoRA | None = None
    """None: no adapters."""
    speculation: ResolvedSpeculation | None = None
    """None: a step computes one token of each output."""
    enable_prompt_embeds: bool = False
    """Rows of numbers may take the place of token embeddings in a prompt."""
    media: ResolvedMedia | None = None
    """None: the model reads text only."""
    download_dir: str | None = None
    """For adapters from the hub; None: the hub's own cache."""
    kv_offloading_bytes: int = 0
    """Host memory of all workers for evicted KV blocks; 0: none."""
    kv_connector: ResolvedKVConnector | None = None
    """Code of the user's that keeps KV blocks, in place of files."""
    kv_transfer: ResolvedKVTransfer | None = None
    """None: KV blocks stay in their engine."""
    kv_offloading_path: str = ""
    """Directory for files of KV blocks; "": there are none."""
    kv_offloading_disk_bytes: int = 0
    """Most bytes of all files there."""
    num_scheduler_steps: int = 1
    """Most decode steps of one plan."""
    kv_offloading_recompute: bool = True
    """Whether what is slower to copy than to compute is computed."""

    @property
    def stores_blocks(self) -> bool:
        """Whether full KV blocks are kept outside of the workers' memory, by files or by a connector."""
        return bool(self.kv_offloading_path) or self.kv_connector is not None

    @property
    def forks_workers(self) -> bool:
        """Whether all workers are on this machine's CPUs, and may be forked from a process that has imported torch.

        Workers on GPUs are not: that has not been tried.
        """
        return self.device == "cpu" and self.executor == "mp" and self.num_nodes == 1

    @property
    def takes_rows(self) -> bool:
        """Whether a step may compute with rows in place of token embeddings: prompt embeddings, or those of media."""
        has_rows = self.media is not None and not self.media.attended_rows and not self.media.vector_width
        return self.enable_prompt_embeds or has_rows

    @property
    def num_deeper_rows(self) -> int:
        """See `MediaFacts.deeper_rows`."""
        return 0 if self.model.media is None else self.model.media.deeper_rows

    @property
    def media_row_width(self) -> int:
        """Numbers of a row of media, with those of the rows beside it."""
        return self.model.embedding_width * (1 + self.num_deeper_rows)

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether tokens attend to later ones, so that a prompt is computed in one step and shares nothing."""
        return is_computed_whole(self.model)

    @property
    def tensor_parallel_size(self) -> int:
        """Workers that share every layer."""
        return self.world_size // self.pipeline_parallel_size

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one row of prompt embeddings."""
        return embedding_bytes(self.model, self.dtype)

    @property
    def is_lock_step(self) -> bool:
        """Whether the workers of all engines divide the experts, so that a step of one is a step of all."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def answering_rank(self) -> int:
        """The worker that sends the results of steps: the first of the last stage."""
        return self.rank_of(self.pipeline_parallel_size - 1, 0)

    def rank_of(self, stage: int, tensor_parallel_rank: int) -> int:
        """Return the number of a worker; those of a stage are neighbours."""
        return stage * self.tensor_parallel_size + tensor_parallel_rank

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the stage of a worker, and its place among those that share the layers of that stage."""
        return divmod(rank, self.tensor_parallel_size)

    @property
    def ranks_per_node(self) -> int:
        """Workers of this engine on each of `num_nodes` machines."""
        return self.world_size // self.num_nodes


# long: a line for each field
def resolve(
    config: EngineConfig, facts: ModelFacts, *, device: DeviceName, num_cores: int, head: ModelFacts | None = None
) -> ResolvedConfig:
    """Decide everything that the user left open. Pure: the same arguments give the same result.

    Args:
        config: the user's settings.
        facts: from the model's files.
        device: the meaning of "auto" on this machine.
        num_cores: cores this process may run on.
        head: facts of the layers to draft with; see `speculation.head_path`.

    Raises:
        ConfigError: two settings contradict each other, or one contradicts the model.
    """
    config = msgspec.structs.replace(config, cache=use_own_settings(config.cache))
    chosen_device = device if config.device.device == "auto" else config.device.device
    dtype = resolve_dtype(config.model.dtype, facts)
    num_stages = config.parallel.pipeline_parallel_size
    world_size = config.parallel.tensor_parallel_size * num_stages
    check_division(facts, config.parallel.tensor_parallel_size)
    check_nodes(config.parallel, world_size)
    check_lock_step(config.parallel, chosen_device, config.device.cpu_kernels)
    check_tp_invariance(config, facts, chosen_device)
    speculation = resolve_speculation(config.speculation, facts, head)
    check_head_engine(
        speculation,
        device=chosen_device,
        num_ranks=config.parallel.tensor_parallel_size,
        num_stages=num_stages,
        is_lock_step=config.parallel.enable_expert_parallel and config.parallel.data_parallel_size > 1,
        has_embeds=bool(config.model.enable_prompt_embeds) or facts.media is not None,
    )
    stage_layers = resolve_stages(config.parallel, facts.num_layers)
    num_local = world_size // config.parallel.nnodes
    binding, num_threads = resolve_threads(config, num_cores, num_local * config.parallel.data_parallel_size)
    stage_threads = num_threads * world_size // num_stages
    max_model_len, fits = _model_len(config, facts)
    steps = resolve_step_limits(config, facts, chosen_device, stage_threads, max_model_len)
    if (config.remote.engine_secret_key_file is None) != (config.remote.engine_authorized_clients is None):
        raise ConfigError(
            "an engine needs both its own key and those of its clients",
            phase="configuration",
            hint="give both --engine-secret-key-file and --engine-authorized-clients, or neither",
        )
    kv_transfer = read_kv_transfer(config.cache.kv_transfer_config)
    kv_connector = read_kv_connector(config.cache.kv_transfer_config)
    check_kv_transfer(
        kv_transfer or kv_connector,
        facts,
        block_multiple=BLOCK_MULTIPLE if chosen_device == "cpu" else 1,
        block_size=config.cache.block_size,
        has_prefix_cache=config.cache.enable_prefix_caching,
        num_nodes=config.parallel.nnodes,
        is_lock_step=config.parallel.enable_expert_parallel and config.parallel.data_parallel_size > 1,
    )
    disable_any_whitespace, disable_additional_properties = resolve_structured_outputs(
        config.structured.structured_outputs_config
    )
    return ResolvedConfig(
        model=facts,
        model_name=config.model.model,
        served_model_names=config.model.served_model_name or [config.model.model],
        dtype=dtype,
        quantization=_quantization(config, facts, dtype, chosen_device),
        packed_weights_cache_bytes=config.model.packed_weights_cache_bytes,
        device=chosen_device,
        num_threads=num_threads,
        cpu_kernels=config.device.cpu_kernels,
        cpu_binding=binding,
        max_graph_size=steps.max_graph_size,
        is_batch_invariant=config.device.enable_deterministic_inference,
        seed=config.model.seed,
        max_model_len=max_model_len,
        fits_model_len=fits,
        max_logprobs=config.model.max_logprobs,
        logprobs_mode=config.model.logprobs_mode,
        logits_processors=[
            *(ProcessorSource(name) for name in config.model.logits_processors or ()),
            *config.processor_code,
        ],
        block_size=config.cache.block_size,
        kv_cache_dtype=resolve_kv_cache_dtype(config, facts, dtype, chosen_device),
        calculate_kv_scales=config.cache.calculate_kv_scales,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        num_blocks_override=config.cache.num_gpu_blocks_override,
        kv_offloading_bytes=offloading_bytes(config, facts, chosen_device, world_size),
        kv_connector=kv_connector,
        kv_transfer=kv_transfer,
        kv_offloading_path=offloading_path(config, facts, chosen_device, kv_connector),
        kv_offloading_disk_bytes=int(config.cache.kv_offloading_disk_size * 2**30),
        kv_offloading_recompute=config.cache.kv_offloading_recompute,
        enable_prefix_caching=config.cache.enable_prefix_caching and not is_computed_whole(facts),
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        full_step_tokens=steps.full_step_tokens,
        decode_interval_tokens=steps.decode_interval_tokens,
        step_time_target_s=steps.step_time_target_s,
        num_scheduler_steps=resolve_scheduler_steps(
            config, chosen_device, has_drafts=speculation is not None, is_pooled=facts.pooling is not None
        ),
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        scheduling_policy=config.scheduler.scheduling_policy,
        async_scheduling=config.scheduler.async_scheduling,
        stream_interval=config.scheduler.stream_interval,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        max_grammar_bytes=config.structured.max_grammar_bytes,
        grammar_timeout_s=config.structured.grammar_timeout,
        disable_any_whitespace=disable_any_whitespace,
        disable_additional_properties=disable_additional_properties,
        restart_core=config.recovery.restart_core,
        core_timeout_s=config.recovery.core_timeout,
        execute_model_timeout_s=config.recovery.execute_model_timeout,
        max_worker_restarts=config.recovery.max_worker_restarts,
        world_size=world_size,
        pipeline_parallel_size=num_stages,
        stage_layers=stage_layers,
        enable_tp_invariant_inference=config.parallel.enable_tp_invariant_inference,
        enable_expert_parallel=_expert_parallel(config, facts),
        data_parallel_size=config.parallel.data_parallel_size,
        executor="ray" if config.parallel.distributed_executor_backend == "ray" else "mp",
        num_nodes=config.parallel.nnodes,
        master_addr=config.parallel.master_addr,
        master_port=config.parallel.master_port,
        group_secret_key_file=config.parallel.group_secret_key_file,
        log_stats=not config.observe.disable_log_stats,
        record_steps=config.observe.record_steps,
        kv_events=read_kv_events(config.observe.kv_events_config),
        engine_secret_key_file=config.remote.engine_secret_key_file,
        engine_authorized_clients=config.remote.engine_authorized_clients,
        chat_template=config.model.chat_template,
        enable_prompt_embeds=takes_prompt_embeds(config, facts, dtype, steps.max_num_batched_tokens),
        lora=resolve_lora(config.lora, dtype, facts),
        media=resolve_media(
            config.media,
            facts,
            steps.max_num_batched_tokens,
            chosen_device,
            world_size,
            max_num_seqs=steps.max_num_seqs,
            max_chunk=config.scheduler.long_prefill_token_threshold,
            num_stages=num_stages,
        ),
        speculation=speculation,
        download_dir=config.model.download_dir,
    )


def _expert_parallel(config: EngineConfig, facts: ModelFacts) -> bool:
    if config.parallel.enable_expert_parallel and not has_experts(facts):
        raise ConfigError(
            f"--enable-expert-parallel: {facts.architecture} has no experts",
            phase="configuration",
            hint="leave it out",
        )
    return config.parallel.enable_expert_parallel


def _quantization(config: EngineConfig, facts: ModelFacts, dtype: DtypeName, device: DeviceName) -> QuantizationName:
    requested = config.model.quantization
    if requested in ("w8a8", "int8", "int4"):
        require_native(config, f"--quantization {requested}", device)
    return resolve_quantization(requested, facts, dtype)


def _model_len(config: EngineConfig, facts: ModelFacts) -> tuple[int, bool]:
    requested, own = config.model.max_model_len, facts.max_position_embeddings
    if requested is None or requested == "auto" or requested == -1:
        usual = facts.pooling.max_seq_length if facts.pooling else 0
        return min(own, usual or own), requested is not None
    if requested < 1 or requested > own:
        raise ConfigError(
            f"max_model_len {requested} is outside 1 to {own}, the number of positions this model has",
            phase="configuration",
            hint=f"use --max-model-len {own} or less",
        )
    return requested, False
