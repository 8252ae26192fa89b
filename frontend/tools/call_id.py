"""Ids of tool calls: generated here, and returned by the client together with the call's result."""

import secrets
import string

_MISTRAL_ALPHABET = string.ascii_letters + string.digits
_MISTRAL_LENGTH = 9


def new_call_id() -> str:
    """Return an id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def new_mistral_call_id() -> str:
    """Return an id of nine letters and digits: Mistral's chat templates reject other ids."""
    return "".join(secrets.choice(_MISTRAL_ALPHABET) for _ in range(_MISTRAL_LENGTH))
