"""The marks of Harmony, and what the header of a message says. Keeps no state."""

import re
from dataclasses import dataclass
from enum import Enum

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
"""All marks; each is one special token of GPT-OSS."""

FUNCTIONS = "functions."
"""Namespace of the functions of a request, before the name of a recipient."""

_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Kind(Enum):
    """What the text of a message is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """Arguments of a function."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message."""

    kind: Kind
    function: str = ""
    """Name of the function that a call is for."""


def read_header(text: str, functions: frozenset[str]) -> Header:
    """Return what a header says; the recipient may be in any of its sections.

    Messages to anything that is not a function of the request, such as the model's browser, are reasoning: they are not
    for the user.

    Args:
        text: between the mark that starts a message and `MESSAGE`.
        functions: names of the functions that may be called; empty: the model may not call any.
    """
    text = text.rpartition(START)[2]
    recipient = _RECIPIENT.search(text)
    channel = _CHANNEL_NAME.search(text)
    if recipient is not None and recipient[1] not in ("assistant", "user", "all"):
        name = recipient[1].removeprefix(FUNCTIONS)
        is_call = bool(functions) and (name in functions or recipient[1].startswith(FUNCTIONS))
        return Header(Kind.CALL, name) if is_call else Header(Kind.REASONING)
    is_reasoning = channel is not None and channel[1] == "analysis"
    return Header(Kind.REASONING if is_reasoning else Kind.CONTENT)
