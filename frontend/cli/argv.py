"""`normalize_argv`: rewrites vLLM's spelling of a command line to ours. Independent of individual flags.

Underscores become dashes (`--max_num_seqs 4`), and members of a JSON object may be passed one by one
(`--default-chat-template-kwargs.enable_thinking false`).
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """Return the arguments with dashes in flag names, and with the members of each JSON flag merged into one object.

    A member without a value is left unchanged; the parser will report it as unknown.
    """
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = deque(map(_with_dashes, argv))
    while rest:
        word = rest.popleft()
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        has_value = equals or (rest and not rest[0].startswith("--"))
        if not (dot and name.startswith("--") and path and has_value):
            result.append(word)
            continue
        _put(objects.setdefault(name, {}), path, value if equals else rest.popleft())
    for name, members in objects.items():
        result += [name, json.dumps(members)]
    return result


def _with_dashes(word: str) -> str:
    """Replace underscores in a flag's name, but not after a dot or an equals sign."""
    if not word.startswith("--"):
        return word
    end = min((place for mark in ".=" if (place := word.find(mark)) >= 0), default=len(word))
    return word[:end].replace("_", "-") + word[end:]


def _put(members: dict[str, Any], path: str, text: str) -> None:
    """Set a member, possibly nested. A value that is not JSON is taken as a string."""
    *outer, name = path.split(".")
    for part in outer:
        inner = members.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = members[part] = {}
        members = inner
    try:
        members[name] = json.loads(text)
    except ValueError:
        members[name] = text
