"""The marks of Harmony, and the parser of message headers. Stateless."""

import re
from dataclasses import dataclass
from enum import Enum

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
"""All marks; each is one special token of GPT-OSS."""

FUNCTIONS = "functions."
"""Namespace of the request's functions, which precedes the name in a recipient."""

_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Kind(Enum):
    """The role of a message's text."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """Arguments of a function call."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message."""

    kind: Kind
    function: str = ""
    """Name of the function that a call is for; "" in other messages."""


def read_header(text: str, functions: frozenset[str]) -> Header:
    """Parse a header. The recipient may be in any of its sections.

    Messages to anything except the request's functions, such as the model's browser, count as reasoning, because they
    are not meant for the user.

    Args:
        text: the text between the mark that starts a message and `MESSAGE`.
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
