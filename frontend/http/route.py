"""`Route`: one entry of the route table, and how its path matches."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from octavo.frontend.http.message import Request, Response
from octavo.frontend.http.serving import Serving

_VARIABLE = re.compile(r"{(\w+)(:path)?}")


@dataclass(frozen=True)
class Route:
    """Who answers what."""

    method: str
    path: str
    """`{name}` stands for one part of a path, `{name:path}` for parts with their slashes."""
    handler: Callable[[Serving, Request], Awaitable[Response]]
    request: type[msgspec.Struct] | None = None
    """Schema of the body; what follows, like this, is for the description of the API alone."""
    response: type[msgspec.Struct] | None = None
    """Schema of a successful answer, if that is JSON."""
    media_type: str | None = None
    """Of a successful answer that is not JSON; None for both: it is empty."""
    streams: bool = False
    """The answer may be a stream of events instead."""
    failures: tuple[int, ...] = ()
    """Statuses that the answer may have beside 200 and those that follow from there being a body."""

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path", "")

    @property
    def variables(self) -> list[str]:
        """Names of the path's variables."""
        return [found[1] for found in _VARIABLE.finditer(self.path)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = _VARIABLE.split(self.path)
        # The parts are text, name, ":path" or None, text, ... in turn.
        texts, names, kinds = parts[::3], parts[1::3], parts[2::3]
        variables = [f"(?P<{name}>{'.+' if kind else '[^/]+'})" for name, kind in zip(names, kinds, strict=True)]
        return re.compile("".join(re.escape(text) + rest for text, rest in zip(texts, [*variables, ""], strict=True)))

    def match(self, path: str) -> dict[str, str] | None:
        """Return what the variables stand for in a path, None when it is not this route's."""
        found = self._pattern.fullmatch(path)
        return None if found is None else found.groupdict()
