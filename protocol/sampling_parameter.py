"""`Parameter`: a row of the table of sampling parameters, and checks of values against it."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from octavo.protocol.errors import InvalidRequestError


class Stage(Enum):
    """Where a parameter takes effect, in the order of a request's life."""

    REQUEST = "request"
    """In the frontend: how many sequences there are, and how they are returned."""
    LOGITS = "logits"
    """Changes logits before they are divided by the temperature."""
    FILTER = "filter"
    """Excludes tokens by their probability."""
    DRAW = "draw"
    """Decides which of the remaining tokens is sampled."""
    STOP = "stop"
    """Decides when the sequence ends."""
    REPORT = "report"
    """Decides what is reported with a token."""


class Kind(Enum):
    """The type of a parameter's value, as documented."""

    INTEGER = "integer"
    NUMBER = "number"
    SWITCH = "switch"
    TEXTS = "texts"
    TOKEN_IDS = "token ids"
    OBJECT = "object"


Ids: TypeAlias = Callable[[Any], Collection[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A field of `SamplingParams`, and of `SamplingSpec` if the engine needs it."""

    name: str
    kind: Kind
    stage: Stage
    default: Any = None
    is_optional: bool = False
    """Whether None is valid although it is not the default."""
    minimum: float | None = None
    """Lower bound. None if there is no bound."""
    maximum: float | None = None
    is_minimum_excluded: bool = False
    max_entries: int | None = None
    """Most entries, for a list."""
    engine_range: tuple[float, float] | None = None
    """Values with which a worker can compute, both ends included. The core rejects all others; NaN is in no range."""
    token_ids: Ids | None = None
    """Returns the token ids in the value of the `SamplingSpec`, which must be in the vocabulary."""
    is_copied: bool = False
    """Whether the engine receives the caller's value unchanged. `make_spec` computes the others."""
    is_request_field: bool = False
    """Whether an HTTP API field with this name and meaning sets it."""
    columns: tuple[str, ...] = ()
    """Columns of `kernels.sample.RequestTable` that exist for it, for the device."""
    meaning: str = ""
    """Description for the documentation."""

    def check(self, value: object) -> None:
        """Check a caller's value against the bounds.

        Raises:
            InvalidRequestError: the value is invalid; names the parameter.
        """
        if value is None and (self.default is None or self.is_optional):
            return
        if self.kind is Kind.INTEGER:
            check_integer(self.name, value, self.minimum, self.maximum)
        elif self.kind is Kind.NUMBER:
            check_number(self.name, value, self.minimum, self.maximum, is_minimum_excluded=self.is_minimum_excluded)
        elif self.max_entries is not None and isinstance(value, list | dict):
            if len(value) > self.max_entries:
                message = f"{self.name} may hold at most {self.max_entries} tokens, got {len(value)}"
                raise InvalidRequestError(message, self.name)
            check_token_ids(self.name, value)

    def engine_fault(self, value: Any, vocab_size: int) -> str | None:
        """Return why a worker cannot compute with the value of a `SamplingSpec`. Return None if it can."""
        if self.engine_range is not None:
            low, high = self.engine_range
            if not low <= value <= high:
                return f"{self.name} must be from {low:g} to {high:g}, got {value}"
        if self.token_ids is not None and value:
            token_ids = self.token_ids(value)
            if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                return f"the token ids of {self.name} must be from 0 to {vocab_size - 1}"
        return None

    @property
    def json_bounds(self) -> dict[str, float]:
        """The bounds as JSON Schema keywords."""
        lowest = "exclusiveMinimum" if self.is_minimum_excluded else "minimum"
        bounds = {lowest: self.minimum, "maximum": self.maximum}
        return {name: bound for name, bound in bounds.items() if bound is not None}


def check_integer(name: str, value: object, low: float | None, high: float | None) -> None:
    """Check that a value is an integer in a range.

    Raises:
        InvalidRequestError: it is not; names the parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)
    _check_range(name, value, low, high, is_minimum_excluded=False)


def check_number(
    name: str, value: object, low: float | None, high: float | None, *, is_minimum_excluded: bool = False
) -> None:
    """Check that a value is a finite number in a range.

    Raises:
        InvalidRequestError: it is not; names the parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidRequestError(f"{name} must be a number, got {value!r}", name)
    if abs(value) > sys.float_info.max:
        raise InvalidRequestError(f"{name} must be finite, got {value!r}", name)
    _check_range(name, value, low, high, is_minimum_excluded=is_minimum_excluded)


def check_token_ids(name: str, token_ids: Collection[int]) -> None:
    """Check that values are token ids.

    Raises:
        InvalidRequestError: names the parameter and the first invalid value.
    """
    # perf: with a call for each of a hundred thousand ids, one request would delay all others.
    if token_ids and not (set(map(type, token_ids)) == {int} and min(token_ids) >= 0):
        for token_id in token_ids:
            check_integer(name, token_id, 0, None)


def _check_range(name: str, value: float, low: float | None, high: float | None, *, is_minimum_excluded: bool) -> None:
    if low is not None and (value < low or (is_minimum_excluded and value == low)):
        least = "above" if is_minimum_excluded else "at least"
        raise InvalidRequestError(f"{name} must be {least} {low}, got {value}", name)
    if high is not None and value > high:
        raise InvalidRequestError(f"{name} must be at most {high}, got {value}", name)
