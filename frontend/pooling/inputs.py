"""Converts texts, pairs and token ids to the tokens that a pooling model reads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from octavo.frontend.generation.media import has_media, make_prompt
from octavo.frontend.generation.prompt import Prompt, TokenizedPrompt, parts_of
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.text.tokenizer import EncodedInput, Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, PromptTooLongError
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.media import MediaItem
from octavo.protocol.pooling_params import PoolingParams

SHORT_BATCH_CHARS = 2_000
"""Below this total number of characters, tokenizing texts takes less time than a thread switch."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts for a cross-encoder, such as a query and a document."""

    first: str
    second: str
    max_tokens: tuple[int, int] = (0, 0)
    """Maximum number of tokens of each text; longer texts are truncated. 0: no limit."""
    render: Callable[[str, str], str] | None = None
    """Renders both texts as one. `None`: the tokenizer's format for pairs is used."""


PoolingPrompt: TypeAlias = Prompt | TextPair
TRUNCATION = "truncate_prompt_tokens"


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the request fields that hold the prompts, for errors."""

    first: str
    """Field of all prompts, or of the first `num_first` prompts."""
    second: str = ""
    num_first: int | None = None
    is_single: bool = False
    """Whether the field holds one prompt instead of a list."""
    limits: tuple[str, str] = (TRUNCATION, TRUNCATION)
    """Fields that limit the tokens of the first and of the second prompts."""

    def limit(self, index: int) -> str:
        """Return the name of the field that limits a prompt."""
        return self.limits[self.num_first is not None and index >= self.num_first]

    def name(self, index: int) -> str:
        """Return the name of the field that holds a prompt."""
        return self.first if self.num_first is None or index < self.num_first else self.second

    def place(self, index: int) -> str:
        """Return the name of the field, with the prompt's index in it."""
        if self.is_single:
            return self.first
        own = index if self.num_first is None or index < self.num_first else index - self.num_first
        return f"{self.name(index)}[{own}]"


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """The tokens of one prompt."""

    token_ids: IdArray
    segment_start: int = 0
    """Start of the second segment; see `PoolingSpec`."""
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolingTokenizer:
    """Tokenizes the prompts of one call. Errors name the prompt by its index."""

    tokenizer: Tokenizer
    config: ResolvedConfig
    threads: TextThreads
    media: PromptMaker | None
    """Makes prompts with media. `None` if the model reads text only."""
    max_model_len: int
    fields: Fields
    add_special_tokens: bool
    cache_salt: str | None

    async def inputs(self, prompts: Sequence[PoolingPrompt], params: PoolingParams, start: int) -> list[PoolingInput]:
        """Return the tokens of prompts, checked.

        Args:
            prompts: texts, token ids, pairs of texts, or prompts with media.
            params: determine the truncation.
            start: index of the first prompt, for errors.

        Raises:
            PromptTooLongError: a prompt has too many tokens and is not truncated.
            InvalidRequestError: a prompt is malformed or empty, or a media item cannot be used.
            OverloadedError: the media of live requests already take too much memory.
        """
        fields, limit = self.fields, self._limit(params, self.fields.limit(start))
        with_media = await self._all_with_media(dict(enumerate(prompts, start)), limit)
        known: list[PoolingInput | None] = []
        texts: list[str | TextPair] = []
        for index, prompt in enumerate(prompts, start):
            if index in with_media:
                known.append(with_media[index])
                continue
            text, token_ids = _text_or_ids(prompt, self.config.model.vocab_size, fields, index)
            known.append(None if token_ids is None else _cut(token_ids, limit, params))
            if token_ids is None:
                texts.append(text)
        try:
            encoded = iter(await self._encode(texts, params, limit) if texts else ())
        except InvalidRequestError as error:
            if error.param == TRUNCATION:
                raise InvalidRequestError(error.message, fields.limit(start)) from None
            raise
        found = []
        for index, given in enumerate(known, start):
            made = _input(next(encoded), self._num_segments) if given is None else given
            if not made.token_ids:
                raise InvalidRequestError(f"{fields.place(index)} is empty: it has no tokens", fields.name(index))
            if len(made.token_ids) > self.max_model_len:
                raise PromptTooLongError(
                    f"{fields.place(index)} has {len(made.token_ids)} tokens, and this model reads at most "
                    f"{self.max_model_len} (max_model_len): shorten it, or set truncate_prompt_tokens to -1",
                    fields.name(index),
                )
            found.append(made)
        return found

    async def _all_with_media(self, prompts: Mapping[int, PoolingPrompt], limit: int | None) -> dict[int, PoolingInput]:
        """Return the tokens of the prompts that have media, which are processed concurrently."""
        tasks = {
            index: asyncio.ensure_future(self._with_media(prompt, limit, index))
            for index, prompt in prompts.items()
            if isinstance(prompt, dict) and has_media(prompt)
        }
        try:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()

    async def _with_media(self, prompt: dict[str, Any], limit: int | None, index: int) -> PoolingInput:
        """Return the tokens of a prompt with media, which cannot be truncated."""
        _, made = await make_prompt(self.media, prompt, self.config.model.vocab_size, self.cache_salt)
        if limit is not None and len(made.token_ids) > limit:
            raise InvalidRequestError(
                f"{self.fields.place(index)} has media and {len(made.token_ids)} tokens, more than "
                f"{self.fields.limit(index)} ({limit}): prompts with media are not cut",
                self.fields.limit(index),
            )
        return PoolingInput(pack_ids(made.token_ids), media=made.items)

    @property
    def _num_segments(self) -> int:
        return self.config.model.pooling.num_segments if self.config.model.pooling else 1

    def _limit(self, params: PoolingParams, field: str) -> int | None:
        """Return the number of tokens to which prompts are truncated. `None` if they are not."""
        limit = params.truncate_prompt_tokens
        if limit is not None and limit > self.max_model_len:
            raise InvalidRequestError(
                f"{field} {limit} is more than the {self.max_model_len} tokens that this model reads: "
                f"{'use -1' if field == TRUNCATION else 'lower it'}",
                field,
            )
        return self.max_model_len if limit == -1 else limit

    async def _encode(
        self, texts: list[str | TextPair], params: PoolingParams, limit: int | None
    ) -> list[EncodedInput]:
        self.tokenizer.require("prompt")
        num_chars = 0
        most = max(2**20, self.max_model_len * self.tokenizer.max_token_chars)
        for text in texts:
            length = len(text) if isinstance(text, str) else len(text.first) + len(text.second)
            if length > most:
                raise PromptTooLongError(
                    f"a text has {length} characters: at most {most} are tokenized by an engine that reads "
                    f"{self.max_model_len} tokens (max_model_len)",
                    "prompt",
                )
            num_chars += length

        def encode() -> list[EncodedInput]:
            encoded = self._encoded(texts, limit, keeps_start=params.truncation_side == "right")
            facts = self.config.model.pooling
            return self._padded(encoded) if facts is not None and facts.pads_texts else encoded

        return encode() if num_chars <= SHORT_BATCH_CHARS else await self.threads.run(encode)

    def _encoded(self, texts: list[str | TextPair], limit: int | None, *, keeps_start: bool) -> list[EncodedInput]:
        facts = self.config.model.pooling
        lowers_case = facts is not None and facts.lowers_case
        eos = self.tokenizer.eos_token_id if facts and facts.appends_eos and self.add_special_tokens else None
        if eos is not None and self.tokenizer.encode("")[-1:] == [eos]:
            eos = None  # the tokenizer appends it itself
        pairs = [text for text in texts if isinstance(text, TextPair)]
        encoded = self.tokenizer.encode_inputs(
            [self._plain(text, lowers_case=lowers_case) for text in texts],
            add_special_tokens=self.add_special_tokens,
            max_tokens=limit if limit is None or eos is None else limit - 1,
            keeps_start=keeps_start,
            max_part_tokens=pairs[0].max_tokens if pairs and pairs[0].render is None else (0, 0),
        )
        return encoded if eos is None else [EncodedInput([*one.ids, eos], one.segment_start) for one in encoded]

    def _padded(self, encoded: Sequence[EncodedInput]) -> list[EncodedInput]:
        """Pad texts at their ends."""
        pad = self.tokenizer.token_id(self.tokenizer.special_tokens.get("pad_token", ""))
        if pad is None:
            raise InvalidRequestError(
                "this model pads its texts, and its tokenizer names no pad_token (tokenizer_config.json)", "prompt"
            )
        return [
            EncodedInput(one.ids + [pad] * (self.max_model_len - len(one.ids)), one.segment_start) for one in encoded
        ]

    def _plain(self, text: str | TextPair, *, lowers_case: bool) -> str | tuple[str, str]:
        if isinstance(text, str):
            return text.lower() if lowers_case else text
        first, second = text.first, text.second
        if text.render is not None:
            limits = text.max_tokens
            first, second = self.tokenizer.shortened(first, limits[0]), self.tokenizer.shortened(second, limits[1])
            return text.render(first, second)
        return (first.lower(), second.lower()) if lowers_case else (first, second)


def _input(encoded: EncodedInput, num_segments: int) -> PoolingInput:
    return PoolingInput(pack_ids(encoded.ids), encoded.segment_start if num_segments > 1 else 0)


def _cut(token_ids: IdArray, limit: int | None, params: PoolingParams) -> PoolingInput:
    if limit is None or len(token_ids) <= limit:
        return PoolingInput(token_ids)
    return PoolingInput(token_ids[:limit] if params.truncation_side == "right" else token_ids[-limit:])


def _text_or_ids(prompt: PoolingPrompt, vocab_size: int, fields: Fields, index: int) -> tuple[Any, IdArray | None]:
    """Return the text or the token ids of a prompt, and `None` for the other; errors name the prompt."""
    if isinstance(prompt, TextPair):
        return prompt, None
    if (isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None) or _has_embeds(prompt):
        raise InvalidRequestError(
            f"{fields.place(index)}: pooling models take no prompt_embeds: send text or token ids", fields.name(index)
        )
    try:
        if not isinstance(prompt, str | dict | Sequence | TokenizedPrompt):
            raise InvalidRequestError(f"a prompt must be text or a list of token ids (integers), not {prompt!r}")
        text, token_ids = parts_of(prompt, vocab_size)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{fields.place(index)}: {error.message}", fields.name(index)) from None
    return cast(str, text), token_ids


def _has_embeds(prompt: object) -> bool:
    return isinstance(prompt, TokenizedPrompt) and prompt.embeds is not None
