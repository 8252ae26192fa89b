"""`CommandError`: a failed command, with a hint for the user."""

from octavo.protocol.errors import OctavoError


class CommandError(OctavoError):
    """Ends a command with exit code 1; `main` prints message and hint as the last line.

    Args:
        message: what went wrong.
        hint: what the user can do, or "".
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
