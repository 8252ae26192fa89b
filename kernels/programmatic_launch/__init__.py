"""Programmatic dependent launch, which lets a kernel begin while the one before it still runs. Off until `enable`.

Such a kernel lets the next one begin at once, prefetches nothing but weights, and then waits until the memory of all
kernels before it is visible: see `gpu.py`. All of its programs wait, so a kernel that is over implies that all before
it are. GPUs before Hopper have no such launches.
"""

MIN_CAPABILITY = (9, 0)
"""Hopper."""

_is_enabled = False


def enable(is_enabled: bool = True) -> None:
    """Launch the kernels that can begin early so, in this process and from now on. Captured graphs stay as they are."""
    global _is_enabled
    _is_enabled = is_enabled


def launch_options() -> dict[str, bool]:
    """Return the arguments of a launch of a kernel that can begin early."""
    # Triton's interpreter does not know `launch_pdl`.
    return {"IS_DEPENDENT": True, "launch_pdl": True} if _is_enabled else {"IS_DEPENDENT": False}
