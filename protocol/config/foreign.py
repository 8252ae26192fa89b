"""vLLM's settings that this engine lacks: which values mean what is done here anyway, and why others are refused.

So that a command line or keyword arguments written for vLLM 0.32 run here, or end in a sentence that says what to do.
Holds no setting of ours: those are in `engine.py` and `server.py`.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["switch", "value", "list"]


class ForeignSetting(Struct, frozen=True):
    """One of them."""

    name: str
    kind: Kind
    """Of its flag: `--name` and `--no-name`, one word, or several."""
    why: str
    """Completes a sentence that begins with the name: what is so here, and what to do."""
    accepted: tuple[str, ...] | None
    """Values that mean what is done here, in lower case; None: all, for it has no effect here."""
    short: str = ""
    """Another spelling of the flag: `-pp`."""


def settled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of vLLM that mean nothing here; one that has no effect is told in the log.

    Raises:
        ConfigError: one of them asks for what this engine does not do.
    """
    own = {}
    for name, value in settings.items():
        if (foreign := FOREIGN.get(name)) is None:
            own[name] = value
        elif value is None:
            continue
        elif name == "profiler_config":
            own |= _profiler(value)
        elif foreign.accepted is None:
            logger.info("--%s has no effect: %s", name.replace("_", "-"), foreign.why)
        elif _text(value) not in foreign.accepted:
            raise ConfigError(
                f"{name}: {foreign.why}", phase="configuration", hint=_hint(foreign, is_on=value is not False)
            )
    return own


def _hint(foreign: ForeignSetting, *, is_on: bool) -> str:
    flag = foreign.name.replace("_", "-")
    if foreign.kind == "switch":
        return f"leave out --{flag}" if is_on else f"leave out --no-{flag}"
    values = [value for value in foreign.accepted or () if value not in ("", "{}", "[]")]
    return f"leave out --{flag}" + (f", or set it to {' or '.join(values)}" if values else "")


def _profiler(value: Any) -> dict[str, Any]:
    """Return our name for what vLLM's profiler settings say.

    Raises:
        ConfigError: they are no JSON object, or ask for another profiler.
    """
    try:
        said = json.loads(value) if isinstance(value, str) else dict(value)
        kind, directory = said.get("profiler"), said.get("torch_profiler_dir")
    except (ValueError, TypeError, AttributeError):
        raise ConfigError("profiler_config is no JSON object", phase="configuration", hint=_PROFILER_HINT) from None
    if kind not in (None, "torch"):
        raise ConfigError(f"profiler_config: there is no profiler {kind!r}", phase="configuration", hint=_PROFILER_HINT)
    return {"torch_profiler_dir": directory} if directory else {}


_PROFILER_HINT = "use --torch-profiler-dir DIRECTORY"


def _text(value: Any) -> str:
    """Return a value as `ForeignSetting.accepted` has it."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, default=str).lower()


def _group(kind: Kind, why: str, accepted: tuple[str, ...] | None, names: str) -> Iterator[ForeignSetting]:
    """Yield settings with one reason; a name may be followed by `/-x`, the short spelling of its flag."""
    for word in names.split():
        name, _, short = word.partition("/")
        yield ForeignSetting(name, kind, why, accepted, short)


_OFF, _ON = ("false",), ("true",)
_EMPTY = ("", "{}", "[]")
_ONE = ("1",)

_COMPILED = "no model is compiled here: kernels are chosen by --cpu-kernels, and the sizes of CUDA graphs are fixed"
_LOADING = "weights are mapped, and kept packed on disk (--packed-weights-cache-bytes)"
_TEXT_ONLY = "models here read and write text alone"
_ONE_WORKER = "this release runs one model on one machine, with one worker"
_NO_LORA = "this release runs no LoRA adapters: merge them into the weights"
_NO_SPECULATION = "this release does not speculate: every token comes from the model itself"
_NO_OFFLOAD = "weights and caches lie in this machine's memory already"
_NO_POOLING = "this release generates text, it makes no embeddings or scores"
_NO_TRANSFER = "this release moves no caches or weights between engines"
_NO_TRACING = "there are the metrics of /metrics and the log, no traces"
_NO_MAMBA = "this release runs models of attention layers"
_NO_PLUGIN = "the engine takes no classes from outside"
_NO_COHERE = "only Cohere's and Anthropic's routes of vLLM know it"


def _settings() -> Iterator[ForeignSetting]:
    yield from _group(
        "switch",
        "it is always so here",
        _ON,
        "enable_prompt_tokens_details enable_server_load_tracking enable_chunked_prefill "
        "long_prefill_token_threshold_adaptive",
    )
    yield from _compute()
    yield from _reading()
    yield from _parallel()
    yield from _unsupported()


def _compute() -> Iterator[ForeignSetting]:
    """Yield what tunes how steps are computed."""
    yield from _group(
        "switch",
        _COMPILED,
        None,
        "enable_flashinfer_autotune jit_monitor_verbose disable_cascade_attn cudagraph_metrics "
        "enable_layerwise_nvtx_tracing disable_hybrid_kv_cache_manager swa_bounded_replay scheduler_reserve_full_isl",
    )
    yield from _group(
        "value",
        _COMPILED,
        None,
        "compilation_config/-cc optimization_level/-O performance_mode kernel_config "
        "attention_config/-ac attention_backend linear_backend moe_backend ir_op_priority jit_monitor_mode "
        "sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend",
    )
    yield from _group("list", _COMPILED, None, "cudagraph_capture_sizes")
    yield from _group(
        "value", "the cache's hashes are cryptographic", ("sha256", "sha256_cbor"), "prefix_caching_hash_algo"
    )
    yield from _group("value", "prompts enter every step that has room", _ONE, "prefill_schedule_interval")
    yield from _group("value", "no share of the cache is held back", ("0", "0.0"), "watermark")
    yield from _group("value", "one step holds --max-num-batched-tokens", (), "max_num_scheduled_tokens")
    yield from _group("value", "one step holds --max-num-seqs", (), "max_num_active_seqs")
    yield from _group("switch", "noise is drawn in one precision", _OFF, "use_fp64_gumbel")
    yield from _group("switch", "sliding windows are part of what a model computes", _OFF, "disable_sliding_window")
    yield from _group("value", "the last cached block is shared as a whole", _EMPTY, "prefix_match_unit")
    yield from _group("value", "cached prefixes go by their last use", ("0",), "prefix_cache_retention_interval")
    yield from _group("list", "all layers have one type of cache", _EMPTY, "kv_cache_dtype_skip_layers")
    yield from _group("switch", "all layers compute all of a prompt", _OFF, "kv_sharing_fast_prefill")
    yield from _group(
        "switch",
        _NO_MAMBA,
        _OFF,
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint use_replayssm",
    )
    yield from _group(
        "value",
        _NO_MAMBA,
        None,
        "mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode replayssm_buffer_len",
    )


def _reading() -> Iterator[ForeignSetting]:
    """Yield what tunes how a model and its texts are read."""
    yield from _group(
        "value",
        _LOADING,
        None,
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "pt_load_map_location",
    )
    yield from _group("list", "only files that are needed are downloaded", None, "ignore_patterns")
    yield from _group("switch", "progress is in the log", None, "use_tqdm_on_load")
    yield from _group("value", "a load format has no settings", _EMPTY, "model_loader_extra_config")
    yield from _group("switch", "no code of a model is ever run", None, "trust_remote_code")
    yield from _group("value", "no code of a model is ever run", _EMPTY, "code_revision")
    yield from _group("value", "configurations are read from config.json", ("auto", "hf"), "config_format")
    yield from _group("value", "config.json is read from MODEL", _EMPTY, "hf_config_path")
    yield from _group("value", "models are those of octavo itself", ("auto", "vllm", "octavo"), "model_impl")
    yield from _group("value", "models are those of octavo itself", _EMPTY, "model_class_overrides")
    yield from _group("value", "texts are prepared on threads as they are needed", None, "renderer_num_workers")
    yield from _group("switch", "--quantization says all there is to say", _OFF, "allow_deprecated_quantization")
    yield from _group("value", "--quantization says all there is to say", _EMPTY, "quantization_config")


def _parallel() -> Iterator[ForeignSetting]:
    """Yield what spreads a model over devices and machines."""
    yield from _group(
        "value",
        _ONE_WORKER,
        _ONE,
        "pipeline_parallel_size/-pp data_parallel_size/-dp data_parallel_size_local/-dpl nnodes/-n "
        "decode_context_parallel_size/-dcp prefill_context_parallel_size/-pcp",
    )
    yield from _group(
        "value", _ONE_WORKER, ("0",), "node_rank/-r data_parallel_rank/-dpn data_parallel_start_rank/-dpr ubatch_size"
    )
    yield from _group("value", "workers are processes", ("mp", "uni"), "distributed_executor_backend")
    yield from _group(
        "switch",
        _ONE_WORKER,
        _OFF,
        "data_parallel_hybrid_lb/-dph data_parallel_external_lb/-dpe "
        "data_parallel_multi_port_external_lb/-dpm "
        "enable_expert_parallel/-ep enable_batch_sharded_sampling enable_ep_weight_filter enable_dbo enable_elastic_ep "
        "enable_eplb enable_hc_sp dcp_q_replicate ray_workers_use_nsight numa_bind enable_fault_tolerance",
    )
    yield from _group(
        "switch",
        _ONE_WORKER,
        None,
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_nccl_comm_suspend "
        "enable_shm_tensor_arena "
        "aggregate_engine_logging fail_on_environ_validation",
    )
    yield from _group(
        "value",
        _ONE_WORKER,
        None,
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_address/-dpa "
        "data_parallel_rpc_port/-dpp "
        "data_parallel_backend/-dpb data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold all2all_backend "
        "dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dp_sync_interval eplb_config expert_placement_strategy "
        "max_parallel_loading_workers "
        "fault_tolerance_config elastic_ep_max_dp_size",
    )
    yield from _group("list", "--cpu-binding says which cores are used", (), "numa_bind_nodes numa_bind_cpus")
    yield from _group("value", "the CPU is used; --cpu-binding says which cores", (), "device_ids")
    yield from _group(
        "value", _NO_PLUGIN, ("auto", ""), "worker_cls worker_extension_cls scheduler_cls io_processor_plugin"
    )
    yield from _group("list", _NO_PLUGIN, _EMPTY, "logits_processors")
    yield from _group("value", _NO_PLUGIN, _EMPTY, "additional_config aux_output_config middleware")


def _unsupported() -> Iterator[ForeignSetting]:
    """Yield features that are not there."""
    yield from _group(
        "switch",
        _NO_LORA,
        _OFF,
        "enable_lora fully_sharded_loras enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format "
        "enable_moe_shared_loras",
    )
    yield from _group("list", _NO_LORA, _EMPTY, "lora_modules lora_target_modules")
    yield from _group("value", _NO_LORA, None, "max_loras max_lora_rank max_cpu_loras lora_dtype max_lora_cls_labels")
    yield from _group("value", _NO_LORA, _EMPTY, "default_mm_loras")
    yield from _group("value", _NO_SPECULATION, _EMPTY, "speculative_config/-sc spec_method spec_model spec_tokens")
    yield from _group("value", _NO_SPECULATION, ("none",), "per_request_spec_decode_metrics")
    yield from _group("value", _NO_OFFLOAD, ("0", "0.0"), "cpu_offload_gb kv_offloading_size offload_group_size")
    yield from _group(
        "value",
        _NO_OFFLOAD,
        None,
        "sleep_mode_backend kv_offloading_backend offload_backend offload_num_in_group offload_prefetch_step",
    )
    yield from _group("list", _NO_OFFLOAD, _EMPTY, "cpu_offload_params offload_params sleep_preserve_parameter_names")
    yield from _group(
        "switch", _NO_OFFLOAD, _OFF, "enable_sleep_mode enable_cumem_allocator sleep_mode_offload_cudagraph"
    )
    yield from _group("value", _NO_POOLING, ("auto", "generate"), "runner")
    yield from _group("value", _NO_POOLING, ("auto", "none"), "convert")
    yield from _group("value", _NO_POOLING, _EMPTY, "pooler_config")
    yield from _group("switch", _NO_POOLING, None, "enable_flash_late_interaction")
    yield from _group(
        "value",
        _NO_TRANSFER,
        _EMPTY,
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config weight_transfer_config engram_config",
    )
    yield from _group(
        "switch",
        _NO_TRACING,
        _OFF,
        "kv_cache_metrics enable_mfu_metrics enable_logging_iteration_details enable_trace_replay",
    )
    yield from _group(
        "value", _NO_TRACING, _EMPTY, "otlp_traces_endpoint custom_histogram_buckets show_hidden_metrics_for_version"
    )
    yield from _group("value", _NO_TRACING, None, "kv_cache_metrics_sample")
    yield from _group("list", _NO_TRACING, _EMPTY, "collect_detailed_traces")
    yield from _group("value", "--log-level and --log-config-file say all there is to say", _EMPTY, "logging_config")
    yield from _group(
        "switch", "it concerns experts, which answers do not tell of", _OFF, "enable_return_routed_experts"
    )
    yield from _group("switch", "logprobs tell of the candidates", _OFF, "return_sampling_mask")
    yield from _group("value", "this release writes tokens from left to right", _EMPTY, "diffusion_config/-dc")
    yield from _group(
        "value",
        "--watchdog-timeout and --core-timeout say when an engine counts as hung",
        _EMPTY,
        "watchdog_config",
    )
    yield from _group("value", "texts carry no watermark", _EMPTY, "watermark_config")
    yield from _group("value", "reasoning is told apart by --reasoning-parser", _EMPTY, "reasoning_config")
    yield from _group("value", "there are the parsers of --reasoning-parser alone", _EMPTY, "reasoning_parser_plugin")
    yield from _group("value", "a tool is bound by its own field strict", ("auto",), "tool_strict_level")
    yield from _group("value", "the model's calls go to the caller, nothing is run here", _EMPTY, "tool_server")
    yield from _group("switch", "it speaks HTTP", _OFF, "grpc tokens_only enable_scale_out")
    yield from _group("value", "it speaks HTTP", (), "grpc_port")
    yield from _group("switch", "prompts are texts or token ids", _OFF, "enable_prompt_embeds")
    yield from _group("switch", "/docs is a page of its own", None, "enable_offline_docs")
    yield from _group("value", "--max-request-head-bytes bounds a head as a whole", None, "h11_max_header_count")
    yield from _group("switch", _NO_COHERE, None, "cohere_is_reasoning_model")
    yield from _group("value", _NO_COHERE, None, "cohere_format anthropic_disabled_thinking_effort")
    yield from _group("value", "traces are those of torch", (), "profiler_config")
    yield from _media()


def _media() -> Iterator[ForeignSetting]:
    """Yield what concerns pictures, sounds and films."""
    yield from _group("switch", _TEXT_ONLY, _OFF, "trust_request_mm_kwargs enable_mm_embeds mm_encoder_only")
    yield from _group(
        "switch",
        _TEXT_ONLY,
        None,
        "language_model_only interleave_mm_strings skip_mm_profiling disable_chunked_mm_input mm_device_do_normalize",
    )
    yield from _group(
        "value",
        _TEXT_ONLY,
        None,
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb",
    )
    yield from _group("value", _TEXT_ONLY, _EMPTY, "allowed_local_media_path")
    yield from _group("list", _TEXT_ONLY, _EMPTY, "allowed_media_domains")


FOREIGN: dict[str, ForeignSetting] = {setting.name: setting for setting in _settings()}
"""All of them, by name."""
