"""`own_words`: a command line as people write it for vLLM, in the spelling that the flags here have. Knows no flag.

Underscores stand for dashes (`--max_num_seqs 4`), and the members of a JSON object may be given one by one
(`--default-chat-template-kwargs.enable_thinking false`).
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words with every flag's name in dashes, and members gathered into one object for each flag.

    A member without a value stays as it is, a flag that nobody knows.
    """
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = deque(map(_with_dashes, words))
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
    """Return a flag with dashes in its name; what follows a dot or an equals sign stays as it is."""
    if not word.startswith("--"):
        return word
    end = min((place for mark in ".=" if (place := word.find(mark)) >= 0), default=len(word))
    return word[:end].replace("_", "-") + word[end:]


def _put(members: dict[str, Any], path: str, text: str) -> None:
    """Set a member, which may lie in objects within; a value that is no JSON is a text."""
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
