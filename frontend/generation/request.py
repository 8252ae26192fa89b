"""A generation request before its prompt is tokenized, common to every API."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.protocol.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Truncation:
    """How to truncate a prompt that is too long."""

    max_tokens: int
    """Number of tokens to keep; -1: as many as the engine can hold."""
    keeps_start: bool = False
    """Whether to cut off the end of the prompt instead of its start."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How a beam search scores beams. Its width and length are in the sampling parameters."""

    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request for one or several prompts."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the caller sets. All others except `max_tokens` are the model's defaults."""
    max_tokens: int | None = None
    """Maximum number of tokens to generate; `None` to use `default_max_tokens`."""
    default_max_tokens: int | None = None
    """The limit if neither the caller nor the model sets one; `None` for the rest of the context."""
    beam: BeamOptions | None = None
    """Options of a beam search; `None` to sample."""
    truncation: Truncation | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: Adapter | None = None
    """The LoRA adapter to use; `None` for none."""

    def with_overrides(self, **overrides: Any) -> "GenerationRequest":
        """Return a copy with additional sampling parameters."""
        return replace(self, overrides={**self.overrides, **overrides})
