"""Messages between the cores of engines that divide the experts of a model: see `core_proc/workers/lock_step.py`.

Each is a packet of a Unix socket, which connects an engine with the first one.
"""

import msgspec


class JoinGroup(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="join"):
    """To the first engine: this one is about to start workers, and waits for the others."""

    engine: int


class GroupFormed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="formed"):
    """From the first engine: all are there. The descriptor of the memory that all workers share comes with it."""


class StepBegun(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="step"):
    """An engine has begun as many steps since the group was formed, more than any other before it."""

    num_steps: int


class LeaveGroup(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="leave"):
    """To the first engine: this one has no requests any more and accepts none. It takes part until all leave."""


class AllLeave(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="all_leave"):
    """From the first engine: no engine has requests any more."""


class WorkersLost(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="workers_lost"):
    """The workers of an engine have failed while steps of all engines were computed: any of their requests may be why.
    The end of the connection follows. Without this message a core has ended, which is no other engine's doing."""

    engine: int


class IsolationState(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="isolation"):
    """To the first engine, whenever it changes."""

    wants_turn: bool = False
    """Whether this engine has crash suspects to run while no other engine runs a request."""
    idle_in: int = 0
    """The number of the present turn, which is another engine's, once this one has no request in flight; 0: it has."""


class IsolationTurn(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="turn"):
    """From the first engine: whose turn it is to run requests."""

    number: int = 0
    engine: int = -1
    """-1: all run theirs."""
    is_alone: bool = False
    """Whether all others have no request in flight."""


LockStepMessage = (
    JoinGroup | GroupFormed | StepBegun | LeaveGroup | AllLeave | WorkersLost | IsolationState | IsolationTurn
)
