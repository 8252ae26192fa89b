"""`PluginObject`: calls the methods of a plugin's object. An exception in the plugin fails only the current request."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from octavo.protocol.errors import RequestFailedError

logger = logging.getLogger(__name__)


class PluginObject:
    """A plugin's parser, created for one output.

    Args:
        name: name of the parser.
        make: creates the object; trailing arguments that it does not take are dropped.
        args: for `make`.
        kwargs: for `make`, if it accepts any.
    """

    def __init__(self, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._name = name
        self._object: Any = None
        self._object = self._run("__init__", _make, make, args, kwargs)

    def has(self, method: str) -> bool:
        """Return whether the object has a method of this name."""
        return callable(getattr(self._object, method, None))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and return its result.

        Raises:
            RequestFailedError: the method raised an exception; the message describes it.
        """
        return self._run(method, lambda: getattr(self._object, method)(*args, **kwargs))

    def attribute(self, name: str) -> Any:
        """Return an attribute. `None` if the object does not have it."""
        return self._run(name, getattr, self._object, name, None)

    def _run(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            logger.exception("the parser %r of a plugin failed in %s", self._name, method)
            raise RequestFailedError(
                f"the parser {self._name!r} of a plugin failed in {method}: {type(error).__name__}: {error}"
            ) from error


def _make(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameters = inspect.signature(make).parameters.values()
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        args = args[: sum(parameter.kind in kinds for parameter in parameters)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return make(*args, **{name: value for name, value in kwargs.items() if takes_any or name in names})
