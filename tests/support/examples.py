"""How many random examples a property is tried with."""

from hypothesis import settings


def examples(short: int, long: int) -> int:
    """Return the number of a usual run, or the larger one of `--long`, which also draws others in every run."""
    return long if settings.get_current_profile_name() == "long" else short
