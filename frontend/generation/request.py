"""A request for a generation before its prompt is tokenized, the same for every API. Resolves nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.protocol.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt that is too long is cut."""

    max_tokens: int
    """Tokens to keep; -1: as many as the engine holds."""
    keeps_start: bool = False
    """Cut off the end of the prompt, not its start."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How a beam search scores; its width and length are those of the sampling parameters."""

    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, which may be for several prompts."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the caller sets. All others except `max_tokens` are the model's own defaults."""
    max_tokens: int | None = None
    """None: `default_max_tokens`."""
    default_max_tokens: int | None = None
    """The limit if neither the caller nor the model's defaults set one; None: the rest of the context."""
    beam: BeamOptions | None = None
    """Search instead of sampling."""
    truncation: Truncation | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: Adapter | None = None
    """The LoRA adapter to use."""

    def with_overrides(self, **overrides: Any) -> "GenerationRequest":
        """Return a copy that sets further sampling parameters."""
        return replace(self, overrides={**self.overrides, **overrides})
