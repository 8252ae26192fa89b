"""`ParamsResolver`: combines a request with the model's defaults and the server's limits. Generates nothing."""

from typing import TYPE_CHECKING, Any

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.generation.prompt import TokenizedPrompt, packed_prompt
from octavo.frontend.generation.request import BeamOptions, GenerationRequest
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import MediaItem
from octavo.protocol.params import MAX_BEAM_WIDTH, MAX_STOP_STRINGS, BeamSearchParams, SamplingParams
from octavo.protocol.sampling_table import MAX_N

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


class ParamsResolver:
    """Resolves the parameters of one server's requests.

    Args:
        client: the client of the engine, whose model has defaults.
        max_n_sequences: maximum number of sequences of one request, over all its prompts.
        max_stop_strings: maximum number of stop strings of one request.
    """

    def __init__(
        self, client: "AsyncClient", max_n_sequences: int = MAX_N, max_stop_strings: int = MAX_STOP_STRINGS
    ) -> None:
        self._client = client
        self._max_n_sequences = max_n_sequences
        self._max_stop_strings = max_stop_strings
        self._defaults: dict[int | None, tuple[ResolvedConfig, SamplingParams]] = {}
        """The model's default parameters by `default_max_tokens`, with the configuration from which they were read."""

    def truncate(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        """Return the prompt tokens that remain after truncation.

        Raises:
            InvalidRequestError: none would remain.
        """
        if request.truncation is None:
            return token_ids
        keep = request.truncation.max_tokens
        if keep == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0, which leaves no token: send how many tokens of the prompt to keep, or -1 "
                "for as many as the model holds",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self._client.facts.max_model_len - (request.max_tokens or 1))
        if len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if request.truncation.keeps_start else token_ids[len(token_ids) - keep :]

    def prepare(
        self,
        request: GenerationRequest,
        text: str | None,
        token_ids: list[int],
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedGeneration:
        """Return the prepared generation for one prompt.

        Args:
            request: the request of the caller.
            text: the text of the prompt, if there is one.
            token_ids: the token ids of the prompt, already truncated.
            media: images or audio clips of the prompt.

        Raises:
            InvalidRequestError: a parameter or a token id is out of range; `param` names it.
        """
        if media:
            _refuse_tokens_only(request, "media")
        params = self._resolve(request, len(token_ids))
        beam_params = None
        if request.beam is not None:
            room = max(1, self._client.facts.max_model_len - len(token_ids))
            beam_params = _beam_params(request.beam, params, room)
        packed = packed_prompt(token_ids, self._client.config.model.vocab_size)
        of_request = request.priority, request.cache_salt
        return PreparedGeneration(text, packed, params, beam_params, *of_request, adapter=request.adapter, media=media)

    def prepare_embeds(self, request: GenerationRequest, prompt: TokenizedPrompt) -> PreparedGeneration:
        """Return the prepared generation for prompt embeddings.

        Raises:
            InvalidRequestError: a parameter is out of range, or needs the tokens of the prompt.
        """
        _refuse_tokens_only(request, "prompt_embeds")
        params, salt = self._resolve(request, len(prompt.token_ids)), request.cache_salt
        embeds, adapter = prompt.embeds, request.adapter
        return PreparedGeneration(None, prompt.token_ids, params, None, request.priority, salt, embeds, adapter)

    def check_num_sequences(self, n: int, num_prompts: int) -> None:
        """Check the number of sequences against the limit.

        Raises:
            InvalidRequestError: `n` sequences per prompt exceed the limit.
        """
        if n * num_prompts > self._max_n_sequences:
            prompts = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
            raise InvalidRequestError(
                f"n={n}{prompts} exceeds the limit of {self._max_n_sequences} sequences per request "
                "(--max-n-sequences)",
                "n",
            )

    def _resolve(self, request: GenerationRequest, num_prompt_tokens: int) -> SamplingParams:
        overrides = request.overrides
        self.check_num_sequences(overrides.get("n", 1), 1)
        self._check_stop(overrides.get("stop", []))
        defaults = self._default_params(request.default_max_tokens)
        max_tokens = request.max_tokens
        if max_tokens is None and defaults.max_tokens is not None:
            # A limit that the caller did not set must not make the prompt too long.
            room = self._client.facts.max_model_len - num_prompt_tokens
            max_tokens = max(1, min(defaults.max_tokens, room))
        return defaults.clone(**overrides, max_tokens=max_tokens)

    def _check_stop(self, stop: Any) -> None:
        count = 1 if isinstance(stop, str) else len(stop)
        if count > self._max_stop_strings:
            raise InvalidRequestError(f"at most {self._max_stop_strings} stop strings, got {count}", "stop")

    def _default_params(self, max_tokens: int | None) -> SamplingParams:
        config, params = self._defaults.get(max_tokens, (None, None))
        if params is None or config is not self._client.config:  # the engine may have been replaced
            params = self._client.default_params(max_tokens=max_tokens)
            self._defaults[max_tokens] = self._client.config, params
        return params


def _refuse_tokens_only(request: GenerationRequest, content: str) -> None:
    """Reject fields that require a prompt of tokens only."""
    for name, value in (("use_beam_search", request.beam), ("truncate_prompt_tokens", request.truncation)):
        if value is not None:
            raise InvalidRequestError(f"{name} cannot be combined with {content}: leave one of them out", name)


def _beam_params(options: BeamOptions, params: SamplingParams, room: int) -> BeamSearchParams:
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "a beam search cannot be combined with structured output", params.structured_outputs.name()
        )
    if params.prompt_logprobs is not None:
        raise InvalidRequestError("a beam search returns no logprobs of an echoed prompt", "echo")
    width = params.num_sequences
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequestError(
            f"a beam search has at most {MAX_BEAM_WIDTH} beams, got {width}",
            "n" if params.best_of is None else "best_of",
        )
    return BeamSearchParams(
        beam_width=width,
        max_tokens=params.max_tokens or room,
        ignore_eos=params.ignore_eos,
        temperature=options.temperature,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
