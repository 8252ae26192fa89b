"""Every error octavo raises on purpose.

::

    OctavoError
    ├── InvalidRequestError (also ValueError)   the caller's fault: HTTP 400, names the field
    │   └── PromptTooLongError                  the prompt can never fit
    ├── ModelNotFoundError                      HTTP 404
    ├── OverloadedError                         the queue is full: HTTP 503, try again later
    ├── ConflictError                           not in this state of the server: HTTP 409
    ├── RequestFailedError                      the engine could not finish this request: HTTP 500
    ├── EngineDeadError                         the core has died: HTTP 500
    ├── StartupError                            a process could not start; carries the root cause
    │   ├── ConfigError (also ValueError)       a flag or a model file is wrong
    │   └── NotEnoughMemoryError                names the flag that would make it fit
    └── ProtocolError                           an unexpected or malformed message
        └── IllegalTransition                   a state machine has no such transition
"""


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that cannot be served as it is.

    Args:
        message: what is wrong, and what is valid.
        param: the parameter at fault, as the caller spelled it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt and `max_tokens` together, exceed what the engine can ever hold."""


class ModelNotFoundError(OctavoError):
    """The request names a model that this server does not serve."""

    param = "model"


class OverloadedError(OctavoError):
    """The queue is full. The same request may be accepted later.

    Args:
        message: which resource is exhausted.
        limit: the setting whose limit was reached. None if the engine accepts no requests at all.
    """

    def __init__(self, message: str, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class ConflictError(OctavoError):
    """The requested operation is impossible in the current state, or while another operation is in progress."""


class RequestFailedError(OctavoError):
    """The engine gave up on this request; other requests are not affected."""


class EngineDeadError(OctavoError):
    """The core process has died. The message holds the root cause if it is known."""


class StartupError(OctavoError):
    """A process failed to start.

    Args:
        message: the root cause, in one line.
        phase: what a child process was doing ("loading weights", "binding sockets", ...); see `StartupFailed.phase`.
        hint: what the user can do about it, or "".
        details: the traceback of the process that failed, or "".
    """

    def __init__(self, message: str, *, phase: str = "", hint: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.phase = phase
        self.hint = hint
        self.details = details

    def of(self, process: str) -> "StartupError":
        """Return the same error with the name of the process that failed."""
        if self.message.startswith(process):
            return self
        return type(self)(f"{process}: {self.message}", phase=self.phase, hint=self.hint, details=self.details)


class ConfigError(StartupError, ValueError):
    """A flag, a configuration file or a model file is wrong."""


class NotEnoughMemoryError(StartupError):
    """The model or its KV cache does not fit. `hint` names the flag that would make it fit."""


class ProtocolError(OctavoError):
    """Two processes disagree: a wrong version, a gap in a sequence, an unexpected message."""


class IllegalTransition(ProtocolError):
    """A state machine has no such transition."""
