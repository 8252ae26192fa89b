"""Messages between the cores of engines that share the experts of a model: see `core_proc/workers/lock_step.py`.

Each message is a packet on a Unix socket that connects an engine with the first one.
"""

import msgspec


class JoinGroup(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="join"):
    """To the first engine: this engine is about to start workers, and waits for the others."""

    engine: int


class GroupFormed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="formed"):
    """From the first engine: the group is complete. The descriptor of the memory shared by all workers is attached."""


class StepBegun(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="step"):
    """An engine has begun this many steps since the group was formed, more than any other before."""

    num_steps: int


class LeaveGroup(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="leave"):
    """To the first engine: this engine has no requests and accepts none. It joins steps until all engines leave."""


class AllLeave(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="all_leave"):
    """From the first engine: no engine has requests any more."""


class WorkersLost(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="workers_lost"):
    """The workers of an engine have failed during steps of all engines: a request of any engine may be the cause. The
    connection is closed after this message. If it is closed without it, a core has died, which is not caused by other
    engines."""

    engine: int


class IsolationState(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="isolation"):
    """To the first engine, whenever the state changes."""

    wants_turn: bool = False
    """Whether this engine has crash suspects to run while no other engine runs requests."""
    idle_in: int = 0
    """The number of the current turn of another engine, once this engine has no request in flight; otherwise 0."""


class IsolationTurn(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="turn"):
    """From the first engine: which engine may run requests."""

    number: int = 0
    engine: int = -1
    """Index of the engine; -1 if all engines may run theirs."""
    is_alone: bool = False
    """Whether all other engines have no request in flight."""


LockStepMessage = (
    JoinGroup | GroupFormed | StepBegun | LeaveGroup | AllLeave | WorkersLost | IsolationState | IsolationTurn
)
