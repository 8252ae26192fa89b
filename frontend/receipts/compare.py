"""Compares a receipt with the receipt of the same request computed again. Computes nothing itself."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from octavo.frontend.receipts.receipt import PromptReceipt, Receipt, SequenceReceipt
from octavo.protocol.config.sources import engine_fields, spelled

_MANY_WORDS = 4
"""Values with more words than this are not shown; only the words that the other value lacks are."""

_OF_RESPONSES = ("index", "weight_versions")
"""Fields of a choice that say nothing about its content."""


class Outcome(IntEnum):
    """Result of a comparison, as an exit status."""

    EQUAL = 0
    DIFFERENT = 1
    INCOMPARABLE = 2


class Verdict(NamedTuple):
    """The outcome for one response, and the reason."""

    outcome: Outcome
    text: str


def compare_fingerprints(recorded: Mapping[str, str], computed: Mapping[str, str]) -> str | None:
    """Return the parts in which two fingerprints differ. `None` if they are equal."""
    names = [name for name in {**recorded, **computed} if recorded.get(name) != computed.get(name)]
    return "; ".join([_differing(name, recorded.get(name, ""), computed.get(name, "")) for name in names]) or None


def compare_answers(recorded: Receipt, computed: Sequence[PromptReceipt]) -> Verdict:
    """Compare the prompts of two receipts whose fingerprints are equal."""
    verdict = _compare_all(recorded.prompts, computed)
    module = recorded.fingerprint.get("variant_module")
    if module and verdict.outcome is Outcome.DIFFERENT:
        text = f"{verdict.text}, but the bits of {module} depend on the batch: such an engine promises nothing"
        return Verdict(Outcome.INCOMPARABLE, text)
    return verdict


def compare_choices(saved: Sequence[Mapping[str, Any]], computed: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Compare the contents of two responses with equal tokens. `None` if they are equal.

    Args:
        saved: choices of the response.
        computed: choices of the same request computed again, in the same order.
    """
    if len(saved) != len(computed):
        return Verdict(Outcome.DIFFERENT, f"the response has {len(saved)} choices, computed were {len(computed)}")
    for index, pair in enumerate(zip(saved, computed, strict=True)):
        one, other = (_without_ids(choice) for choice in pair)
        names = [name for name in {**one, **other} if name not in _OF_RESPONSES and one.get(name) != other.get(name)]
        if names:
            text = (
                f"all tokens are equal, but not {names[0]} of choice {index}: the response was changed, or this "
                "command has other parsers or another tokenizer"
            )
            return Verdict(Outcome.DIFFERENT, text)
    return None


def is_aborted(receipt: Receipt) -> bool:
    """Return whether a sequence was aborted; it is compared up to that point."""
    return any(sequence.finish_reason == "abort" for prompt in receipt.prompts for sequence in prompt.sequences)


def num_tokens(receipt: Receipt) -> int:
    """Return the number of tokens in a receipt."""
    return sum([len(sequence.token_ids) for prompt in receipt.prompts for sequence in prompt.sequences])


def _compare_all(recorded: Sequence[PromptReceipt], computed: Sequence[PromptReceipt]) -> Verdict:
    for index, (one, other) in enumerate(zip(recorded, computed, strict=True)):
        of_prompt = f" of prompt {index}" if len(recorded) > 1 else ""
        if (difference := _incomparable(one, other)) is not None:
            return Verdict(Outcome.INCOMPARABLE, difference + of_prompt)
        if (difference := _different(one, other)) is not None:
            return Verdict(Outcome.DIFFERENT, difference + of_prompt)
    return Verdict(Outcome.EQUAL, "")


def _incomparable(recorded: PromptReceipt, computed: PromptReceipt) -> str | None:
    """Return why two requests differ after all. `None` if they are the same."""
    if recorded.prompt != computed.prompt:
        lengths = f"{recorded.num_prompt_tokens} in the receipt, {computed.num_prompt_tokens} here"
        return f"the prompt has other tokens ({lengths}): the chat template, its settings or the tokenizer differ"
    if recorded.params != computed.params:
        values = [
            f"{name} is {recorded.params.get(name, 'the default')} in the receipt, "
            f"{computed.params.get(name, 'the default')} here"
            for name in {**recorded.params, **computed.params}
            if recorded.params.get(name) != computed.params.get(name)
        ]
        return f"{'; '.join(values)}: defaults or limits differ (generation_config.json, --max-model-len, parsers)"
    if recorded.seed is not None and computed.seed is not None and (recorded.seed - computed.seed) % 2**64:
        return f"the seed is {recorded.seed} in the receipt, {computed.seed} here"
    return None


def _different(recorded: PromptReceipt, computed: PromptReceipt) -> str | None:
    """Return a description of the first difference between the sequences. `None` if there is none."""
    if recorded.prompt_logprobs != computed.prompt_logprobs:
        return f"different logprobs of the prompt: {recorded.prompt_logprobs} recorded, {computed.prompt_logprobs} here"
    if len(recorded.sequences) != len(computed.sequences):
        return f"{len(recorded.sequences)} choices recorded, {len(computed.sequences)} here"
    for one, other in zip(recorded.sequences, computed.sequences, strict=True):
        if (difference := _first_difference(one, other)) is not None:
            of_choice = f" of choice {one.index}" if len(recorded.sequences) > 1 else ""
            return difference + of_choice
    return None


def _first_difference(recorded: SequenceReceipt, computed: SequenceReceipt) -> str | None:
    lengths = len(recorded.token_ids), len(computed.token_ids)
    for position in range(max(lengths)):
        if position >= lengths[0] and recorded.finish_reason == "abort":
            return None
        pair = [_token_at(one, position) for one in (recorded, computed)]
        if pair[0] != pair[1]:
            return f"different at token {position}: {pair[0]} recorded, {pair[1]} here"
    if recorded.finish_reason == "abort":
        return None
    if recorded.digest != computed.digest:
        return f"different digest of all {lengths[0]} tokens: {recorded.digest} recorded, {computed.digest} here"
    ends = [(one.finish_reason, one.stop_reason) for one in (recorded, computed)]
    return None if ends[0] == ends[1] else f"different end: {ends[0]} recorded, {ends[1]} here"


def _token_at(sequence: SequenceReceipt, position: int) -> str:
    if position >= len(sequence.token_ids):
        return f"none (finish_reason {sequence.finish_reason})"
    return f"{sequence.token_ids[position]} with logprobs {sequence.logprobs_at(position) or 'missing'}"


def _differing(name: str, recorded: str, computed: str) -> str:
    flag = f" ({spelled(name)} {recorded})" if recorded and name in {info.name for info in engine_fields()} else ""
    return f"{name} is {_shown(recorded, computed)} in the receipt, {_shown(computed, recorded)} here{flag}"


def _shown(value: str, other: str) -> str:
    words = value.split()
    if len(words) > _MANY_WORDS:
        own = [word for word in words if word not in other.split()]
        return f"... {' '.join(own)}" if own else "the same without these"
    return value or "nothing"


def _without_ids(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice without the ids of tool calls, which are random."""
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(calls := message.get("tool_calls"), Iterable):
        return dict(choice)
    plain = [{name: value for name, value in call.items() if name != "id"} for call in calls if isinstance(call, dict)]
    return {**choice, "message": {**message, "tool_calls": plain}}
