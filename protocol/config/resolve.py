"""`resolve()`: from the user's settings and the model's facts to a configuration without open values."""

import msgspec

from octavo.protocol.code import ProcessorSource
from octavo.protocol.config.cache_dtype import require_native, resolve_kv_cache_dtype
from octavo.protocol.config.division import check_division, has_experts
from octavo.protocol.config.engine import DeviceName, EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.kv_connectors import use_own_settings
from octavo.protocol.config.kv_events import read_kv_events
from octavo.protocol.config.kv_transfer import (
    ResolvedKVConnector,
    ResolvedKVTransfer,
    check_kv_transfer,
    read_kv_connector,
    read_kv_transfer,
)
from octavo.protocol.config.lock_step import check_lock_step
from octavo.protocol.config.lora import resolve_lora
from octavo.protocol.config.media import resolve_media
from octavo.protocol.config.model import DtypeName, QuantizationName
from octavo.protocol.config.nodes import check_nodes
from octavo.protocol.config.offloading import BLOCK_MULTIPLE, offloading_bytes, offloading_path
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.config.prompt_embeds import takes_prompt_embeds
from octavo.protocol.config.resolved import ResolvedConfig
from octavo.protocol.config.speculation import ResolvedSpeculation, check_head_engine, resolve_speculation
from octavo.protocol.config.stages import resolve_stages
from octavo.protocol.config.step_limits import resolve_scheduler_steps, resolve_step_limits
from octavo.protocol.config.structured_outputs import resolve_structured_output
from octavo.protocol.config.threads import resolve_threads
from octavo.protocol.config.tp_invariance import check_tp_invariance
from octavo.protocol.config.weight_format import resolve_dtype, resolve_quantization
from octavo.protocol.errors import ConfigError


# long: a line for each field
def resolve(
    config: EngineConfig, facts: ModelFacts, *, device: DeviceName, num_cores: int, head: ModelFacts | None = None
) -> ResolvedConfig:
    """Resolve everything that the user left open. Pure: the same arguments give the same result.

    Args:
        config: the user's settings.
        facts: facts from the model's files.
        device: the device that "auto" means on this machine.
        num_cores: number of cores on which this process may run.
        head: facts of the draft layers or draft model; see `speculation.head_path`.

    Raises:
        ConfigError: two settings contradict each other, or a setting contradicts the model.
    """
    config = msgspec.structs.replace(config, cache=use_own_settings(config.cache))
    chosen_device = device if config.device.device == "auto" else config.device.device
    dtype = resolve_dtype(config.model.dtype, facts)
    parallel = config.parallel
    num_stages, world_size = parallel.pipeline_parallel_size, parallel.world_size
    speculation = resolve_speculation(config.speculation, facts, head)
    kv_transfer = read_kv_transfer(config.cache.kv_transfer_config)
    kv_connector = read_kv_connector(config.cache.kv_transfer_config)
    _check(config, facts, chosen_device, speculation, kv_transfer or kv_connector)
    num_local = world_size // parallel.nnodes
    binding, num_threads = resolve_threads(config, num_cores, num_local * parallel.data_parallel_size)
    max_model_len, fits = _model_len(config, facts)
    steps = resolve_step_limits(config, facts, chosen_device, num_threads * world_size // num_stages, max_model_len)
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
        structured_output=resolve_structured_output(config.structured),
        recovery=config.recovery,
        world_size=world_size,
        pipeline_parallel_size=num_stages,
        stage_layers=resolve_stages(parallel, facts.num_layers),
        enable_tp_invariant_inference=parallel.enable_tp_invariant_inference,
        enable_expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=parallel.data_parallel_size,
        executor="ray" if parallel.distributed_executor_backend == "ray" else "mp",
        num_nodes=parallel.nnodes,
        master_addr=parallel.master_addr,
        master_port=parallel.master_port,
        group_secret_key_file=parallel.group_secret_key_file,
        log_stats=not config.observe.disable_log_stats,
        record_steps=config.observe.record_steps,
        kv_events=read_kv_events(config.observe.kv_events_config),
        remote=config.remote,
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


def _check(
    config: EngineConfig,
    facts: ModelFacts,
    device: DeviceName,
    speculation: ResolvedSpeculation | None,
    transfer: ResolvedKVTransfer | ResolvedKVConnector | None,
) -> None:
    parallel, remote = config.parallel, config.remote
    check_division(facts, parallel.tensor_parallel_size)
    check_nodes(parallel, parallel.world_size)
    check_lock_step(parallel, device, config.device.cpu_kernels)
    check_tp_invariance(config, facts, device)
    check_head_engine(
        speculation,
        num_ranks=parallel.tensor_parallel_size,
        num_stages=parallel.pipeline_parallel_size,
        is_lock_step=parallel.is_lock_step,
        has_embeds=bool(config.model.enable_prompt_embeds) or facts.media is not None,
    )
    check_kv_transfer(
        transfer,
        facts,
        block_multiple=BLOCK_MULTIPLE if device == "cpu" else 1,
        block_size=config.cache.block_size,
        has_prefix_cache=config.cache.enable_prefix_caching,
        num_nodes=parallel.nnodes,
        is_lock_step=parallel.is_lock_step,
    )
    if parallel.enable_expert_parallel and not has_experts(facts):
        raise ConfigError(f"--enable-expert-parallel: {facts.architecture} has no experts", hint="leave it out")
    if (remote.engine_secret_key_file is None) != (remote.engine_authorized_clients is None):
        raise ConfigError(
            "an engine needs both its own key and those of its clients",
            hint="give both --engine-secret-key-file and --engine-authorized-clients, or neither",
        )


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
            hint=f"use --max-model-len {own} or less",
        )
    return requested, False
