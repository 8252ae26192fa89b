"""Builds a model and loads its weights, whatever their format."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from octavo.kernels.experts import ExpertExchange
from octavo.kernels.linear import Packer
from octavo.kernels.linear.quantization import Quantization
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.config.weight_format import checkpoint_quantization, resolve_quantization
from octavo.protocol.errors import ConfigError, NotEnoughMemoryError, StartupError
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.device.cpu import freed_memory_returns
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.origins import UnreadTensorError
from octavo.worker_proc.models.registry import build_model, fallback_reads
from octavo.worker_proc.parallel.group import TensorParallelGroup
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import Sharding
from octavo.worker_proc.parallel.stages import ALL_LAYERS, Stage, StageExchange, split_layers, stages_of
from octavo.worker_proc.weights.cache_scales import read_cache_scales
from octavo.worker_proc.weights.dummy import fill_dummy
from octavo.worker_proc.weights.formats import log_formats
from octavo.worker_proc.weights.heads import load_head
from octavo.worker_proc.weights.media import load_towers, read_text_weights
from octavo.worker_proc.weights.packed_cache import PackedCache
from octavo.worker_proc.weights.quantized.assembly import open_format
from octavo.worker_proc.weights.quantized.layout import quantize_dummy

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_CPU = torch.device("cpu")
_SMALLER = {
    "cpu": "use --quantization int8, --dtype bfloat16 or a smaller model",
    "cuda": "use --dtype bfloat16 or a smaller model",
}
"""Hints for weights that do not fit in memory, by device type."""

_OTHER_IMPL = "run with --model-impl transformers, whose model of this architecture has such a tensor"

_TORCH_ALLOCATOR = "DefaultCPUAllocator"
"""Part of the message of the RuntimeError that torch raises when it is out of memory."""


def torch_dtype(config: ResolvedConfig) -> torch.dtype:
    """Return the type of weights, activations and cache."""
    return _DTYPES[config.dtype]


@freed_memory_returns()
@torch.inference_mode()
def load_model(
    config: ResolvedConfig,
    report: Callable[[float], None],
    *,
    device: torch.device = _CPU,
    library: NativeLibrary | None = None,
    cache_dir: Path | None = None,
    rank: int = 0,
    group: TensorParallelGroup | None = None,
    exchange: StageExchange | None = None,
    engines: ExpertExchange | None = None,
) -> Model:
    """Return the configured model, or one worker's part of it, with its packed weights on a device.

    Args:
        config: model facts, dtype, quantization and the seed of dummy weights.
        report: called with the fraction of the weights read so far.
        device: device for the weights.
        library: computes with the weights; `None` if torch does.
        cache_dir: cache directory of octavo, for packed weights; `None` if they are not kept.
        rank: rank of this worker among all.
        group: ranks that share its layers; `None` if there are no others.
        exchange: the previous and the next stage; `None` if there are none.
        engines: engines that hold the other experts; `None` if this one has all.

    Raises:
        ConfigError: an architecture, file or tensor is missing or not supported, or a quantization has no native
            kernels.
        NotEnoughMemoryError: the weights do not fit.
    """
    try:
        index, rank_in_stage = config.place_of(rank)
        sharding = Sharding.of(config, rank_in_stage)
        placement = Placement(torch_dtype(config), device, sharding, group, stage_of(config, index), engines)
        if (num_stages := config.pipeline_parallel_size) > 1:
            layers = placement.stage.layers
            logger.info("stage %d of %d: layers %d to %d", index + 1, num_stages, layers[0], layers[-1])
        model = _load(config, report, placement, library, cache_dir)
        model.exchange = exchange
        if config.speculation is not None and config.speculation.head is not None:
            if config.speculation.method == "draft_model":
                model.head = _load_draft_model(config, config.speculation, report, placement, library, cache_dir)
            else:
                load_head(config.speculation, model, config.max_num_batched_tokens, report)
        model.towers = load_towers(config, model)
        model.cross_cache = _cross_cache(config, model)
        if config.takes_rows:
            model.take_given_rows(config.max_num_batched_tokens, config.num_deeper_rows)
        return model
    except (RuntimeError, MemoryError) as error:
        is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or _TORCH_ALLOCATOR in str(error)
        if not is_of_memory:
            raise
        raise NotEnoughMemoryError(
            f"the weights do not fit in memory: {error}",
            hint=_SMALLER[device.type],
        ) from error


def _cross_cache(config: ResolvedConfig, model: Model) -> CrossCache | None:
    """Return the cross-attention cache of a model; `None` if it has no cross-attention.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """
    if config.media is None or not model.cross_layers:
        return None
    num_keys = config.media.attended_rows
    return CrossCache(
        model.cross_layers[0].shape,
        len(model.cross_layers),
        num_items=config.media.encoder_cache_tokens // num_keys,
        num_keys=num_keys,
        block_size=config.block_size,
        dtype=model.dtype,
        library=model.library,
        device=model.device,
        group=len(model.cache_groups) + (model.state_group is not None),
        aligned_layers=config.media.aligned_layers,
    )


def stage_of(config: ResolvedConfig, index: int) -> Stage:
    """Return the layers of a stage. Every worker computes the same division itself.

    Raises:
        ConfigError: the model is not supported.
    """
    num_stages = config.pipeline_parallel_size
    if num_stages == 1:
        return ALL_LAYERS
    if config.stage_layers:
        return stages_of(config.stage_layers)[index]
    shapes = build_model(config.model, Placement(torch_dtype(config), torch.device("meta")))
    return stages_of(split_layers(*shapes.parameters.sizes(), num_stages))[index]


def _load(
    config: ResolvedConfig,
    report: Callable[[float], None],
    placement: Placement,
    library: NativeLibrary | None,
    cache_dir: Path | None,
) -> Model:
    packer = packer_of(config, placement.device, library)
    rank, layers = placement.sharding.rank, placement.stage.layers
    cache = PackedCache.of(config, library, cache_dir, rank, layers) if cache_dir else None
    model = build_model(config.model, placement)
    model.library = library
    if config.kv_cache_dtype == "fp8":
        model.cache_scales = read_cache_scales(config.model, model.stage.layers)
        _report_cache_scales(config, len(model.cache_scales))
    if cache and cache.restore(model.parameters, packer):
        log_formats(model.parameters.linears)
        return model
    keeps_quantized = computes_on_codes(config)
    _log_second_rounding(config)
    if config.model.load_format == "dummy":
        if keeps_quantized and (section := config.model.hf_config.get("quantization_config")):
            quantize_dummy(model.parameters.linears, open_format(section, {}).layout, f"{config.seed} {rank}")
        fill_dummy(
            model.parameters.named(is_unquantized=True), config.seed, rank=rank, divided=model.parameters.divided
        )
    else:
        weights = read_text_weights(config.model, report, model.parameters.wants)
        try:
            model.load_weights(weights, packer, keeps_quantized=keeps_quantized)
        except UnreadTensorError as error:
            is_read = model.impl == "octavo" and fallback_reads(config.model, placement, error.name)
            raise ConfigError(error.message, hint=_OTHER_IMPL if is_read else error.hint) from error
    model.pack(packer, keeps_quantized=keeps_quantized)
    log_formats(model.parameters.linears)
    if cache:
        cache.keep(model.parameters, packer)
    return model


def _load_draft_model(
    config: ResolvedConfig,
    speculation: ResolvedSpeculation,
    report: Callable[[float], None],
    placement: Placement,
    library: NativeLibrary | None,
    cache_dir: Path | None,
) -> Model:
    """Return the draft model with its weights, packed.

    Raises:
        ConfigError: the model cannot be loaded, or cannot draft.
    """
    facts = speculation.head
    assert facts is not None, "the files of the draft model"
    try:
        quantization = resolve_quantization(speculation.quantization, facts, config.dtype)
        own = msgspec.structs.replace(config, model=facts, quantization=quantization)
        sharding = Sharding.of(own, placement.sharding.rank)
        model = _load(own, report, dataclasses.replace(placement, sharding=sharding), library, cache_dir)
    except StartupError as error:
        raise ConfigError(f"speculative_config: model {facts.model_path}: {error.message}", hint=error.hint) from error
    obstacle = ""
    if model.state_group is not None:
        obstacle = "has recurrent states, which cannot be taken back"
    elif len(model.cache_groups) != 1:
        obstacle = f"has {len(model.cache_groups)} kinds of attention layers; one is supported"
    elif not model.cache_groups[0].shape.is_causal:
        obstacle = "attends in both directions"
    elif model.segment_stride:
        obstacle = "rotates long requests in another way than short ones"
    if obstacle:
        raise ConfigError(
            f"speculative_config: model: {facts.architecture} {obstacle}", hint="name a draft model like Llama or Qwen"
        )
    return model


def _report_cache_scales(config: ResolvedConfig, num_layers: int) -> None:
    """Log the source of the scales of keys and values.

    Raises:
        ConfigError: the checkpoint has scales, although they were to be measured.
    """
    if config.calculate_kv_scales and num_layers:
        raise ConfigError(
            f"--calculate-kv-scales, but the checkpoint has scales of keys and values for {num_layers} layers",
            hint="leave it out to use them",
        )
    if num_layers or config.calculate_kv_scales:
        logger.info("keys and values in 8-bit floats: %d layers have scales in the checkpoint", num_layers)
        return
    logger.info(
        "keys and values in 8-bit floats without scales: numbers beyond 448 are clamped; --calculate-kv-scales "
        "measures scales"
    )


def _log_second_rounding(config: ResolvedConfig) -> None:
    """Log that weights which are quantized in the checkpoint are quantized again."""
    own = checkpoint_quantization(config.model)
    if own is not None and config.quantization in ("w8a8", "int8", "int4"):
        logger.warning(
            "--quantization %s rounds the checkpoint's %s weights a second time, which adds to their loss; without the "
            "flag they are computed as they are",
            *(config.quantization, own),
        )


def computes_on_codes(config: ResolvedConfig) -> bool:
    """Return whether weights that are quantized in the checkpoint stay so."""
    return config.quantization not in ("none", "w8a8", "int8", "int4")


def packer_of(config: ResolvedConfig, device: torch.device, library: NativeLibrary | None) -> Packer:
    """Return the packer of the configured quantization.

    Raises:
        ConfigError: the quantization needs the native library.
    """
    if config.quantization in ("w8a8", "int8", "int4") and library is None:
        raise ConfigError(
            f"--quantization {config.quantization} needs the native kernels, which are not available",
            hint="see the warning above, or leave --quantization out",
        )
    if config.enable_tp_invariant_inference and library is None and config.device == "cpu":
        raise ConfigError(
            "--enable-tp-invariant-inference needs the native kernels, which are not available",
            hint="see the warning above, or leave --enable-tp-invariant-inference out",
        )
    return Packer(
        device,
        native=library,
        quantization=_quantization_while_loading(config),
        is_batch_invariant=config.is_batch_invariant,
        is_tp_invariant=config.enable_tp_invariant_inference,
    )


def _quantization_while_loading(config: ResolvedConfig) -> Quantization | None:
    """Return the quantization of weights that the checkpoint holds in 16 or 32 bits; `None` if they stay so."""
    match config.quantization:
        case "w8a8" | "int8" | "int4":
            return config.quantization
        case "fp8" if checkpoint_quantization(config.model) is None:
            return "fp8"
        case "bitsandbytes" if checkpoint_quantization(config.model) is None:
            return "nf4"
    return None
