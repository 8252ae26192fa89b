"""`PoolingParams`: a caller's parameters for a pooling model. `params.PoolingSpec` is the form sent to the engine."""

from typing import Any, Literal

import msgspec

from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling import POOLING_TASKS, PoolingTask


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """What to compute for a prompt instead of tokens, with the field names and semantics of vLLM's `PoolingParams`."""

    use_activation: bool | None = None
    """Whether to normalize embeddings and apply the activation to class scores. None for the model's default."""
    dimensions: int | None = None
    """Length to which embeddings are truncated (Matryoshka). None for the default of `--pooler-config`, else all
    values."""
    step_tag_id: int | None = None
    """With step pooling: the token at whose positions results are returned. None for the model's default."""
    returned_token_ids: list[int] | None = None
    """With step pooling: the class scores to return. None for the default of `--pooler-config`, else all."""
    task: PoolingTask | None = None
    """None for the model's default task."""
    skip_reading_prefix_cache: bool | None = None
    """If None, only if the result needs the hidden states of all tokens."""
    truncate_prompt_tokens: int | None = None
    """Truncate longer prompts to this many tokens; -1 for `max_model_len`. If None, they are rejected."""
    truncation_side: Literal["left", "right"] = "right"
    """The side on which they are truncated."""
    normalize: bool | None = None
    """Older name of `use_activation`."""

    def verify(self) -> None:
        """Check types and ranges.

        Raises:
            InvalidRequestError: a field is out of range; `param` names it.
        """
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if self.use_activation is not None and self.normalize is not None:
            raise InvalidRequestError("normalize is another name of use_activation: give one of them", "normalize")
        for name, least in (("dimensions", 1), ("step_tag_id", 0), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value < 2**31):
                raise InvalidRequestError(f"{name} must be an integer of at least {least}, got {value!r}", name)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens 0 leaves no token: use 1 or more", "truncate_prompt_tokens"
            )
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequestError(
                f"truncation_side must be left or right, got {self.truncation_side!r}", "truncation_side"
            )
        for index in self.returned_token_ids or ():
            if type(index) is not int or not 0 <= index < 2**31:
                raise InvalidRequestError(
                    f"returned_token_ids must be integers from 0, got {index!r}", "returned_token_ids"
                )
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequestError(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}", "task")

    def clone(self, **changes: Any) -> "PoolingParams":
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)
