"""Limits that requests must keep before they are sent: lengths, volume, token ids, salts."""

from collections.abc import Collection

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, PromptTooLongError
from octavo.protocol.params import SamplingParams

MAX_VOLUME = 2**23
"""Maximum number of token ids that one request may send to the engine, about 40 MB."""
_MAX_NAMED_IDS = 8
"""Number of token ids that an error lists."""


def room_after_prompt(max_tokens: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """Return the number of tokens that may be generated after a prompt.

    Raises:
        InvalidRequestError: the prompt is empty.
        PromptTooLongError: the prompt, or the prompt plus `max_tokens`, can never fit.
    """
    room = max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token", "prompt")
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens, and this engine holds {max_model_len} (max_model_len) "
            "with at least one generated: shorten the prompt or start the engine with a larger --max-model-len",
            "prompt",
        )
    if max_tokens is not None and max_tokens > room:
        raise PromptTooLongError(
            f"max_tokens {max_tokens} and {num_prompt_tokens} prompt tokens exceed the {max_model_len} tokens "
            f"this engine holds (max_model_len): ask for at most {room}",
            "max_tokens",
        )
    return room


def check_volume(params: SamplingParams, num_prompt_tokens: int, num_prompts: int, config: ResolvedConfig) -> None:
    """Reject a request whose sequences together exceed the engine's limits. Each sequence is sent separately.

    Args:
        params: the parameters of every prompt.
        num_prompt_tokens: number of prompt tokens of all prompts together.
        num_prompts: number of prompts.
        config: the configuration of the engine.

    Raises:
        InvalidRequestError: the request can never be queued, or takes more memory than one request should.
    """
    num_sequences = params.num_sequences * num_prompts
    most = config.max_num_queued_reqs + config.max_num_seqs
    if config.max_num_queued_reqs and num_sequences > most:
        raise InvalidRequestError(
            f"{num_sequences} sequences can never be queued at once: at most {most} are (--max-num-queued-reqs and "
            "--max-num-seqs)",
            "n",
        )
    volume = params.num_sequences * (num_prompt_tokens + num_prompts * params.num_token_ids)
    if volume > MAX_VOLUME:
        raise InvalidRequestError(
            f"{num_sequences} sequences with {num_prompt_tokens} prompt tokens and lists of {params.num_token_ids} "
            f"token ids are {volume} token ids to send to the engine: at most {MAX_VOLUME} are sent for one request",
            "n",
        )


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Reject token ids outside the vocabulary.

    Raises:
        InvalidRequestError: an id is outside the vocabulary; the error names `param` and the first such ids.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    names = ", ".join(map(str, bad[:_MAX_NAMED_IDS])) + (", ..." if len(bad) > _MAX_NAMED_IDS else "")
    ids, are = ("id", "is") if len(bad) == 1 else ("ids", "are")
    # Clients of vLLM look for "out of vocabulary".
    raise InvalidRequestError(
        f"{param}: token {ids} {names} {are} out of vocabulary, which has {vocab_size} tokens", param
    )


def check_cache_salt(cache_salt: object) -> None:
    """Reject a salt that cannot be sent to the core.

    Raises:
        InvalidRequestError: the salt is not text, or cannot be encoded.
    """
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not _is_unicode(cache_salt):
        raise InvalidRequestError(f"cache_salt must be text, got {cache_salt!r}", "cache_salt")


def _is_unicode(text: str) -> bool:
    """Return False if the text has an unpaired surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
