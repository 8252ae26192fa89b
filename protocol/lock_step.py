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


LockStepMessage = JoinGroup | GroupFormed | StepBegun | LeaveGroup | AllLeave
