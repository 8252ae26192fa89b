"""The number of random examples of a property test."""

from hypothesis import settings


def examples(short: int, long: int) -> int:
    """Return `short`, or with `--long` the larger number; `--long` also draws other examples in every run."""
    return long if settings.get_current_profile_name() == "long" else short
