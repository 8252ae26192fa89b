"""The logprobs of given tokens after a prompt, as sampling would report them. Returns no generated tokens."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from octavo.frontend.generation.preparation import RequestPreparer
from octavo.frontend.generation.prompt import Prompt, TokenizedPrompt, packed_prompt
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import OutputKind, SamplingParams


class Generates(Protocol):
    """The part of a client that scoring needs."""

    @property
    def config(self) -> ResolvedConfig:
        """Configuration of the engine."""

    @property
    def preparer(self) -> RequestPreparer:
        """Checks prompts."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        /,
        *,
        priority: int,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
    ) -> AsyncIterator[RequestOutput]:
        """See `AsyncClient.generate`."""


async def score_tokens(
    client: Generates,
    prompt: Prompt,
    tokens: Sequence[int],
    *,
    priority: int,
    cache_salt: str | None,
    lora_request: LoRARequest | None = None,
) -> list[float]:
    """Return a logprob for each token; see `AsyncClient.score_tokens`."""
    mode = client.config.logprobs_mode
    if mode != "raw_logprobs":
        raise InvalidRequestError(
            f"score_tokens returns raw logprobs, and this engine reports {mode}: start it with "
            "--logprobs-mode raw_logprobs",
            "logprobs_mode",
        )
    given, cache_salt = await client.preparer.check_prompt(prompt, priority, cache_salt)
    if given.embeds is not None:
        raise InvalidRequestError("score_tokens takes no prompt_embeds: send text or token ids", "prompt_embeds")
    if not given.token_ids:
        raise InvalidRequestError("the prompt is empty: give at least one token", "prompt")
    if not tokens:
        return []
    known = packed_prompt(tokens, client.config.model.vocab_size)
    # The last token is scored where it would be drawn. So a request that fills the whole context can be scored.
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprob_token_ids=[tokens[-1]],
        prompt_logprobs=0 if len(tokens) > 1 else None,
        ignore_eos=True,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )
    scored = TokenizedPrompt(None, pack_ids([*given.token_ids, *known[:-1]]), media=given.media)
    outputs = client.generate(scored, params, priority=priority, cache_salt=cache_salt, lora_request=lora_request)
    (output,) = [output async for output in outputs]
    (drawn,) = output.outputs
    if not drawn.logprobs:  # it was aborted before its only token
        raise InvalidRequestError("the request was aborted before the tokens were scored", "request_id")
    rows = [*(output.prompt_logprobs or [])[len(given.token_ids) :], drawn.logprobs[0]]
    return [row[token].logprob for row, token in zip(rows, tokens, strict=True) if row is not None]
