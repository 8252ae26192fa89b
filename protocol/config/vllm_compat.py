"""vLLM settings that octavo does not have: the values that are accepted without effect, and why others are rejected.

A command line or keyword arguments written for vLLM 0.32 work here, or are rejected with what to do instead. octavo's
own settings are in `engine.py` and `server.py`.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["switch", "value", "list"]


class VllmSetting(Struct, frozen=True):
    """A setting of vLLM."""

    name: str
    kind: Kind
    """Form of its flag: `--name` and `--no-name`, one value, or several."""
    why: str
    """What octavo does instead, and what to do. Follows the name in messages."""
    accepted: tuple[str, ...] | None
    """Values that match what octavo does, in lower case. None for any value, if the setting has no effect."""
    short: str = ""
    """Short form of the flag: `-pp`."""


def translate_vllm_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only vLLM has. Settings without effect are logged.

    Raises:
        ConfigError: a setting requires something that octavo does not do.
    """
    own = {}
    for name, value in settings.items():
        if (setting := VLLM_SETTINGS.get(name)) is None:
            own[name] = value
        elif value is None:
            continue
        elif name == "profiler_config":
            own |= _profiler(value)
        elif name == "reasoning_config" and _has_marks_of_parsers(value):
            continue
        elif setting.accepted is None:
            logger.info("--%s has no effect: %s", name.replace("_", "-"), setting.why)
        elif _text(value) not in setting.accepted:
            raise ConfigError(f"{name}: {setting.why}", hint=_hint(setting, is_on=value is not False))
    return own


def _hint(setting: VllmSetting, *, is_on: bool) -> str:
    flag = setting.name.replace("_", "-")
    if setting.kind == "switch":
        return f"leave out --{flag}" if is_on else f"leave out --no-{flag}"
    values = [value for value in setting.accepted or () if value not in ("", "{}", "[]")]
    return f"leave out --{flag}" + (f", or set it to {' or '.join(values)}" if values else "")


def _profiler(value: Any) -> dict[str, Any]:
    """Return octavo's settings for vLLM's profiler settings.

    Raises:
        ConfigError: they are not a JSON object, or require another profiler.
    """
    try:
        options = json.loads(value) if isinstance(value, str) else dict(value)
        kind, directory = options.get("profiler"), options.get("torch_profiler_dir")
    except (ValueError, TypeError, AttributeError):
        raise ConfigError("profiler_config is not a JSON object", hint=_PROFILER_HINT) from None
    if kind not in (None, "torch"):
        raise ConfigError(f"profiler_config: there is no profiler {kind!r}", hint=_PROFILER_HINT)
    return {"torch_profiler_dir": directory} if directory else {}


def _has_marks_of_parsers(value: Any) -> bool:
    """Return whether a reasoning_config has only the markers that all reasoning parsers here have."""
    try:
        marks = json.loads(value) if isinstance(value, str) else dict(value)
    except (ValueError, TypeError):
        return False
    return isinstance(marks, dict) and marks.items() <= _REASONING_MARKS.items()


_REASONING_MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
_PROFILER_HINT = "use --torch-profiler-dir DIRECTORY"


def _text(value: Any) -> str:
    """Return a value in the form of `VllmSetting.accepted`."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, default=str).lower()


def _group(kind: Kind, why: str, accepted: tuple[str, ...] | None, names: str) -> Iterator[VllmSetting]:
    """Yield settings that share a reason. A name may be followed by `/-x`, the short form of its flag."""
    for word in names.split():
        name, _, short = word.partition("/")
        yield VllmSetting(name, kind, why, accepted, short)


_OFF, _ON = ("false",), ("true",)
_EMPTY = ("", "{}", "[]")
_ONE = ("1",)

_COMPILED = "models are not compiled: --cpu-kernels selects the kernels, and the sizes of CUDA graphs are fixed"
_LOADING = "weights are memory-mapped, and cached on disk in packed form (--packed-weights-cache-bytes)"
_TEXT_ONLY = "only text models are supported"
_ONE_WORKER = "workers share layers (--tensor-parallel-size) or requests (--data-parallel-size), on one machine"
_LORA = "adapters in PEFT's format are served with --enable-lora, for linear layers, embeddings and lm_head"
_NO_OFFLOAD = "weights are never offloaded; --kv-offloading-size keeps evicted KV blocks in host memory"
_NO_TRANSFER = "this release does not transfer caches or weights between engines"
_NO_TRACING = "/metrics has other metrics, and --otlp-traces-endpoint sends traces of requests"
_NO_MAMBA = "recurrent states are float32, and checkpoints of them are as far apart as their size asks for"
_NO_PLUGIN = "the engine cannot be extended by classes"
_NO_COHERE = "it applies only to vLLM's Cohere and Anthropic routes"


def _settings() -> Iterator[VllmSetting]:
    yield from _group(
        "switch",
        "it is always on",
        _ON,
        "enable_prompt_tokens_details enable_server_load_tracking enable_chunked_prefill "
        "long_prefill_token_threshold_adaptive",
    )
    yield from _compute()
    yield from _reading()
    yield from _parallel()
    yield from _unsupported()


def _compute() -> Iterator[VllmSetting]:
    """Yield settings of computation and scheduling."""
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
    yield from _group("value", "every step with room admits prompts", _ONE, "prefill_schedule_interval")
    yield from _group("value", "no part of the cache is reserved", ("0", "0.0"), "watermark")
    yield from _group("value", "the limit is --max-num-batched-tokens", (), "max_num_scheduled_tokens")
    yield from _group("value", "the limit is --max-num-seqs", (), "max_num_active_seqs")
    yield from _group("switch", "sampling noise has one precision", _OFF, "use_fp64_gumbel")
    yield from _group("switch", "sliding windows are part of the model", _OFF, "disable_sliding_window")
    yield from _group("value", "whole blocks are shared", _EMPTY, "prefix_match_unit")
    yield from _group("value", "cached prefixes are evicted by last use", ("0",), "prefix_cache_retention_interval")
    yield from _group("list", "all layers have the same cache type", _EMPTY, "kv_cache_dtype_skip_layers")
    yield from _group("switch", "all layers compute the whole prompt", _OFF, "kv_sharing_fast_prefill")
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


def _reading() -> Iterator[VllmSetting]:
    """Yield settings of models, tokenizers and texts."""
    yield from _group(
        "value",
        _LOADING,
        None,
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "pt_load_map_location",
    )
    yield from _group("list", "only files that are needed are downloaded", None, "ignore_patterns")
    yield from _group("switch", "progress is logged", None, "use_tqdm_on_load")
    yield from _group("value", "load formats have no settings", _EMPTY, "model_loader_extra_config")
    yield from _group("value", "code of a model is read from --revision", _EMPTY, "code_revision")
    yield from _group("value", "config.json is read from MODEL", _EMPTY, "hf_config_path")
    yield from _group("value", "octavo has its own model implementations", _EMPTY, "model_class_overrides")
    yield from _group("value", "texts are processed on threads as needed", None, "renderer_num_workers")
    yield from _group("switch", "--quantization is the only setting", _OFF, "allow_deprecated_quantization")
    yield from _group("value", "--quantization is the only setting", _EMPTY, "quantization_config")


def _parallel() -> Iterator[VllmSetting]:
    """Yield settings of distributed execution."""
    yield from _group(
        "value",
        _ONE_WORKER,
        _ONE,
        "data_parallel_size_local/-dpl decode_context_parallel_size/-dcp prefill_context_parallel_size/-pcp",
    )
    yield from _group("value", _ONE_WORKER, ("0",), "data_parallel_rank/-dpn data_parallel_start_rank/-dpr ubatch_size")
    yield from _group(
        "switch",
        _ONE_WORKER,
        _OFF,
        "data_parallel_hybrid_lb/-dph data_parallel_external_lb/-dpe "
        "data_parallel_multi_port_external_lb/-dpm "
        "enable_batch_sharded_sampling enable_ep_weight_filter enable_dbo enable_elastic_ep "
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
        "distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_address/-dpa "
        "data_parallel_rpc_port/-dpp "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold all2all_backend "
        "dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dp_sync_interval eplb_config expert_placement_strategy "
        "max_parallel_loading_workers "
        "fault_tolerance_config elastic_ep_max_dp_size",
    )
    yield from _group("list", "--cpu-binding selects the cores", (), "numa_bind_nodes numa_bind_cpus")
    yield from _group("value", "--cpu-binding selects the cores of a CPU", (), "device_ids")
    yield from _group(
        "value", _NO_PLUGIN, ("auto", ""), "worker_cls worker_extension_cls scheduler_cls io_processor_plugin"
    )
    yield from _group("value", _NO_PLUGIN, _EMPTY, "additional_config aux_output_config")


# long: a table
def _unsupported() -> Iterator[VllmSetting]:
    """Yield settings of features that octavo does not have."""
    yield from _group(
        "switch",
        _LORA,
        _OFF,
        "enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    )
    yield from _group("switch", _LORA, None, "specialize_active_lora")
    yield from _group("list", "the adapters' own target_modules apply", _EMPTY, "lora_target_modules")
    yield from _group("value", "adapters have no classification heads", None, "max_lora_cls_labels")
    yield from _group("value", _TEXT_ONLY, _EMPTY, "default_mm_loras")
    yield from _group(
        "value",
        "/metrics counts drafts and accepted tokens of all requests",
        ("none",),
        "per_request_spec_decode_metrics",
    )
    yield from _group("value", _NO_OFFLOAD, ("0", "0.0"), "cpu_offload_gb offload_group_size")
    yield from _group(
        "value",
        _NO_OFFLOAD,
        None,
        "sleep_mode_backend offload_backend offload_num_in_group offload_prefetch_step",
    )
    yield from _group("value", "the workers offload blocks themselves", ("native",), "kv_offloading_backend")
    yield from _group("list", _NO_OFFLOAD, _EMPTY, "cpu_offload_params offload_params sleep_preserve_parameter_names")
    yield from _group("switch", _NO_OFFLOAD, _OFF, "enable_cumem_allocator sleep_mode_offload_cudagraph")
    yield from _group(
        "switch", "every engine can sleep; --enable-dev-routes serves /sleep and /wake_up", None, "enable_sleep_mode"
    )
    yield from _group(
        "switch", "scores of late interaction are computed by the server", None, "enable_flash_late_interaction"
    )
    yield from _group(
        "value",
        _NO_TRANSFER,
        _EMPTY,
        "ec_transfer_config ec_manager_config weight_transfer_config engram_config",
    )
    yield from _group(
        "switch",
        _NO_TRACING,
        _OFF,
        "kv_cache_metrics enable_mfu_metrics enable_logging_iteration_details",
    )
    yield from _group(
        "switch", "LLM.score_tokens(prompt, tokens) returns the logprobs of given tokens", _OFF, "enable_trace_replay"
    )
    yield from _group(
        "value", "there are no metrics of earlier releases to show", None, "show_hidden_metrics_for_version"
    )
    yield from _group("value", _NO_TRACING, None, "kv_cache_metrics_sample")
    yield from _group(
        "list", "--otlp-traces-endpoint traces the phases of every request", None, "collect_detailed_traces"
    )
    yield from _group("value", "--log-level and --log-config-file configure logging", _EMPTY, "logging_config")
    yield from _group("switch", "responses do not report experts", _OFF, "enable_return_routed_experts")
    yield from _group("switch", "logprobs report the candidates", _OFF, "return_sampling_mask")
    yield from _group("value", "this release has no diffusion models", _EMPTY, "diffusion_config/-dc")
    yield from _group(
        "value",
        "--watchdog-timeout and --core-timeout detect a hung engine",
        _EMPTY,
        "watchdog_config",
    )
    yield from _group("value", "texts have no watermark", _EMPTY, "watermark_config")
    yield from _group(
        "value", "the marks are those of --reasoning-parser, <think> and </think>", _EMPTY, "reasoning_config"
    )
    yield from _group("value", "each tool's own field strict applies", ("auto",), "tool_strict_level")
    yield from _group("value", "tool calls are returned to the client and never run here", _EMPTY, "tool_server")
    yield from _group("switch", "the server speaks HTTP only", _OFF, "grpc tokens_only")
    yield from _group(
        "switch", "/inference/v1/generate is always served, and there is no /render", None, "enable_scale_out"
    )
    yield from _group("value", "the server speaks HTTP only", (), "grpc_port")
    yield from _group("switch", "/docs is served either way", None, "enable_offline_docs")
    yield from _group("value", "--max-request-head-bytes limits the whole head", None, "h11_max_header_count")
    yield from _group("switch", _NO_COHERE, None, "cohere_is_reasoning_model")
    yield from _group("value", _NO_COHERE, None, "cohere_format anthropic_disabled_thinking_effort")
    yield from _group("value", "the only profiler is torch's", (), "profiler_config")
    yield from _media()


def _media() -> Iterator[VllmSetting]:
    """Yield settings of images, audio and video."""
    yield from _group("switch", _TEXT_ONLY, _OFF, "trust_request_mm_kwargs mm_encoder_only")
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
        "mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb",
    )


VLLM_SETTINGS: dict[str, VllmSetting] = {setting.name: setting for setting in _settings()}
"""All of vLLM's settings that octavo does not have, by name."""
