"""`PreparedGeneration`: a prompt and its parameters, checked and complete, ready to start."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.adapters import Adapter
from octavo.protocol.ids import IdArray
from octavo.protocol.media import MediaItem
from octavo.protocol.params import BeamSearchParams, SamplingParams
from octavo.protocol.prompt_embeds import PromptEmbeds

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


@dataclass(frozen=True, slots=True)
class PreparedGeneration:
    """A prepared prompt with its parameters."""

    text: str | None
    """Text of the prompt; `None` if the caller sent token ids."""
    token_ids: IdArray
    params: SamplingParams
    beam_params: BeamSearchParams | None = None
    """Parameters of a beam search; `params` then only supplies `n` and `logprobs`. `None` if tokens are sampled."""
    priority: int = 0
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    """Prompt embeddings; see `TokenizedPrompt`."""
    adapter: Adapter | None = None
    media: tuple[MediaItem, ...] = ()

    async def start(self, client: "AsyncClient", request_id: str, arrived: WakeEvent) -> Generation:
        """Start the generation and return it; see `RequestPreparer.start`. Not for beam searches."""
        return await client.preparer.start(
            self._prompt,
            self.params,
            arrived,
            request_id=request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )

    async def search(self, client: "AsyncClient", request_id: str) -> RequestOutput:
        """Return the output of a beam search; see `AsyncClient.beam_search`."""
        assert self.beam_params is not None
        output = await client.beam_search(
            self._prompt,
            self.beam_params,
            request_id=request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            logprobs=self.params.logprobs,
            lora_request=self.adapter,
        )
        return replace(output, outputs=output.outputs[: self.params.n])

    @property
    def _prompt(self) -> TokenizedPrompt:
        return TokenizedPrompt(self.text, self.token_ids, self.embeds, self.media)
