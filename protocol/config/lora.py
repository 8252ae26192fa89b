"""LoRA adapters: the user's settings, and their resolved form."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

MAX_RANK = 512
DEFAULT_RANK = 16

LoRADtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]


class LoRAConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters: parts of a model's weights that requests choose by name."""

    enable_lora: Annotated[bool, Meta(description="Serve LoRA adapters in PEFT's format in addition to the model.")] = (
        False
    )
    max_loras: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(
            description="Most adapters in one step. Each has a slot in device memory, whose size depends on "
            "--max-lora-rank. Default: 1."
        ),
    ] = None
    max_lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RANK)] | None,
        Meta(description=f"Largest rank of an adapter, up to {MAX_RANK}. Default: {DEFAULT_RANK}."),
    ] = None
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Number of adapters that each worker keeps in host memory, including those in slots: the most "
            "recently used ones. Default: --max-loras."
        ),
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"] | None,
        Meta(description="Data type of adapter weights. Default: auto, which is --dtype."),
    ] = None
    fully_sharded_loras: Annotated[
        bool | None,
        Meta(
            description="Divide both factors of an adapter among the workers of --tensor-parallel-size, instead of "
            "only the factor whose base weight is divided: less memory and work per worker, but one more "
            "exchange."
        ),
    ] = None


class ResolvedLoRA(Struct, frozen=True, kw_only=True):
    """Adapters of a running engine."""

    max_loras: int
    """Number of slots."""
    max_rank: int
    max_cpu_loras: int
    """At least `max_loras`."""
    dtype: LoRADtypeName
    is_fully_sharded: bool = False


def resolve_lora(config: LoRAConfig, dtype: LoRADtypeName, facts: ModelFacts) -> ResolvedLoRA | None:
    """Return the settings of an engine with adapters. Return None for an engine without adapters.

    Raises:
        ConfigError: settings contradict each other, or the model supports no adapters.
    """
    media_adapters = facts.media.adapters if facts.media is not None else {}
    if not config.enable_lora and not media_adapters:
        for name in config.__struct_fields__:
            if name != "enable_lora" and getattr(config, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{name} needs enable_lora", hint=f"use --enable-lora, or leave out {flag}")
        return None
    if facts.media is not None and facts.media.attended_rows:
        raise ConfigError(
            f"--enable-lora: {facts.media.architecture} transcribes audio, and octavo has no adapters for it",
            hint="leave --enable-lora out, and serve the merged weights",
        )
    least_rank = facts.media.adapter_rank if facts.media is not None else 0
    if config.max_lora_rank is not None and config.max_lora_rank < least_rank:
        raise ConfigError(
            f"max_lora_rank {config.max_lora_rank}: the model's own adapters for media have rank {least_rank}",
            hint=f"use --max-lora-rank {least_rank} or more, or leave it out",
        )
    max_loras = config.max_loras or max(1, len(media_adapters))
    max_cpu_loras = max_loras if config.max_cpu_loras is None else config.max_cpu_loras
    if max_cpu_loras < max_loras:
        raise ConfigError(
            f"max_cpu_loras ({max_cpu_loras}) is below max_loras ({max_loras})",
            hint=f"use --max-cpu-loras {max_loras} or more",
        )
    return ResolvedLoRA(
        max_loras=max_loras,
        max_rank=config.max_lora_rank or max(DEFAULT_RANK, least_rank),
        max_cpu_loras=max_cpu_loras,
        dtype=dtype if config.lora_dtype is None or config.lora_dtype == "auto" else config.lora_dtype,
        is_fully_sharded=bool(config.fully_sharded_loras),
    )
