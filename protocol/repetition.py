"""Repetition detection: `RepetitionDetectionParams` from the caller, and `RepetitionSpec` for the core.

The search itself is in `core_proc/scheduler/repetition.py`.
"""

import msgspec

from octavo.protocol.errors import InvalidRequestError

MAX_PATTERN_SIZE = 2048
"""The search runs after each token. With this limit it takes about twenty microseconds, a few milliseconds at worst."""

_FIELD = "repetition_detection"


class RepetitionSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Ends a sequence whose last tokens repeat a pattern `min_count` times. Completely resolved."""

    min_pattern_size: int
    """In tokens; at least 1."""
    max_pattern_size: int
    min_count: int
    """At least 2."""

    @property
    def fault(self) -> str:
        """Why this is invalid. Empty if it is valid."""
        if not 1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            return f"pattern sizes must be from 1 to {MAX_PATTERN_SIZE}, and min_pattern_size at most max_pattern_size"
        return "" if self.min_count >= 2 else f"min_count must be at least 2, got {self.min_count}"


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Ends an output that repeats itself, with finish reason "repetition". Names and semantics are vLLM's."""

    max_pattern_size: int = 0
    """Longest pattern to look for, in tokens; 0 disables the detection."""
    min_pattern_size: int = 0
    """Shortest pattern to look for; 0 means 1."""
    min_count: int = 0
    """How many times in a row the pattern must occur at the end of the output."""

    def spec(self) -> RepetitionSpec | None:
        """Return the form for the core. Return None if repetition is not detected.

        Raises:
            InvalidRequestError: a size or the count is out of range.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**63:
                raise InvalidRequestError(f"{_FIELD}.{name} must be an integer of at least 0, got {value!r}", _FIELD)
        if not self.max_pattern_size and not self.min_pattern_size:
            return None
        spec = RepetitionSpec(max(1, self.min_pattern_size), self.max_pattern_size, self.min_count)
        if spec.fault:
            raise InvalidRequestError(f"{_FIELD}: {spec.fault}", _FIELD)
        return spec
