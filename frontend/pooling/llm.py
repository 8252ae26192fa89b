"""`PoolingLLM`: the methods of `LLM` that compute vectors, classes and scores of prompts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from octavo.frontend.generation.prompt import Prompt, TokenizedPrompt
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
    pooling_output,
)
from octavo.frontend.pooling.result import PooledResult
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling import PoolingTask
from octavo.protocol.pooling_params import PoolingParams

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient

T = TypeVar("T")

Params = PoolingParams | Sequence[PoolingParams] | None
OFFLINE_WINDOW = 1024
"""Maximum number of prompts in flight; higher than online, because no other caller waits for the engine."""


class PoolingLLM(ABC):
    """Mixin of `LLM`. Outputs are in the order of the prompts.

    Shared arguments: `prompts` is one or several; `pooling_params` apply to all prompts, or there is one per prompt
    (`None`: the model's defaults); `lora_request` is an adapter for all prompts; `use_tqdm` shows a progress bar.

    Raises:
        InvalidRequestError: a prompt or a parameter is invalid, or the model generates text. All requests were aborted.
        RequestFailedError: the engine gave up on a request.
        EngineDeadError: the engine has died or was closed.
    """

    client: "AsyncClient"

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the result of each prompt as an array, for `pooling_task` or the model's default task."""
        return self._pool(pooling_output, prompts, pooling_params, pooling_task, lora_request, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding vector for each prompt."""
        return self._pool(embedding_output, prompts, pooling_params, "embed", lora_request, use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the class scores of each prompt."""
        return self._pool(classification_output, prompts, pooling_params, "classify", lora_request, use_tqdm=use_tqdm)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the scores of each token, or of each step, of each prompt."""
        return self._pool(pooling_output, prompts, pooling_params, "token_classify", lora_request, use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        data_2: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts or contents.

        Args:
            data_1: one text, such as a query, for all of `data_2`, or one per entry of it. An object with parts,
                {"content": [{"type": "image_url", ...}]}, may replace a text if the model reads media.
            data_2: the other texts, such as documents.
            use_tqdm: show a progress bar.
            pooling_params: for all pairs.
            lora_request: for all pairs.
            chat_template: template for the pairs of a cross-encoder, as a file or Jinja source. `None`: the engine's.
        """
        num_pairs = 1 if isinstance(data_2, str | dict) else len(data_2)
        with _bar(num_pairs, use_tqdm=use_tqdm) as on_progress:
            return self._run(
                self.client.score(
                    data_1,
                    data_2,
                    pooling_params,
                    lora_request=lora_request,
                    chat_template=chat_template,
                    window=OFFLINE_WINDOW,
                    on_progress=on_progress,
                )
            )

    def _pool(
        self,
        convert: Callable[[PooledResult], T],
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        task: PoolingTask | None,
        lora_request: LoRARequest | None,
        *,
        use_tqdm: bool,
    ) -> list[T]:
        several = as_prompts(prompts)
        with _bar(len(several), use_tqdm=use_tqdm) as on_progress:
            results = self._run(
                self.client.pool(
                    several,
                    one_per_prompt("pooling_params", params, len(several)) if params is not None else None,
                    task=task,
                    lora_request=lora_request,
                    window=OFFLINE_WINDOW,
                    on_progress=on_progress,
                )
            )
        return [convert(one) for one in results]

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's thread."""


@contextmanager
def _bar(count: int, *, use_tqdm: bool) -> Iterator[Callable[[int], object]]:
    with tqdm(total=count, desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
        yield bar.update


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of ints is a single prompt."""
    if isinstance(prompts, str | dict | TokenizedPrompt):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and type(several[0]) is int else several


def one_per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return a list with one value per prompt; a single value is repeated.

    Raises:
        InvalidRequestError: the number of values differs from the number of prompts.
    """
    if not isinstance(value, Iterable) or isinstance(value, str):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts", name)
    return values
