"""Logits processors in an engine: the same bits alone and among others, arguments, faults, and who may send code."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny
from workloads import Ask, ask_all, ask_one_by_one

from octavo import LogitsProcessor, SamplingParams
from octavo.frontend.client import AsyncClient
from octavo.protocol.errors import ConfigError, InvalidRequestError, RequestFailedError, StartupError

PROCESSORS = '''
import torch
from octavo import AdapterLogitsProcessor


class NoRepeat(AdapterLogitsProcessor):
    """Halves the logits of tokens that were output; raises at a given length."""

    def __init__(self, config, device, is_pin_memory):
        super().__init__(config, device, is_pin_memory)
        assert config.model.vocab_size > 7

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        arguments = params.extra_args or {}
        if "raises_at" not in arguments and "halve" not in arguments:
            return None

        def process(prompt, output, logits):
            if len(output) == arguments.get("raises_at"):
                raise ZeroDivisionError("as it was told")
            logits[torch.tensor(prompt + output)] *= 0.5
            return logits

        return process
'''

TARGET = Path(__file__).parents[2] / "docs/processors/target.py"

SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6, "num_gpu_blocks_override": 24, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    (directory / "processors.py").write_text(PROCESSORS)
    return directory


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(model: Path, loop: asyncio.Runner) -> Iterator[AsyncClient]:
    names = [f"{TARGET}:TargetToken", f"{model}/processors.py:NoRepeat"]

    async def launch() -> AsyncClient:
        return await AsyncClient.launch(
            str(model), logits_processors=names, logprobs_mode="processed_logprobs", **SETTINGS
        )

    client = loop.run(launch())
    yield client
    loop.run(client.close())


def asks() -> list[Ask]:
    """Requests with and without arguments, greedy and drawn, more than fit at once."""
    arguments: list[dict[str, Any] | None] = [None, {"halve": True}, {"target_token": 7}, {"halve": 1, "raises_at": 99}]
    return [
        Ask(
            tuple(range(3, 5 + number % 9)),
            SamplingParams(
                max_tokens=6 + number % 20,
                temperature=(0.0, 0.8, 1.3)[number % 3],
                top_k=(0, 9)[number % 2],
                frequency_penalty=(0.0, 0.5)[number % 2],
                seed=number,
                ignore_eos=True,
                logprobs=2,
                extra_args=arguments[number % 4],
            ),
        )
        for number in range(24)
    ]


def test_a_request_in_a_storm_is_the_request_alone(client: AsyncClient, loop: asyncio.Runner) -> None:
    requests = asks()
    alone = loop.run(ask_one_by_one(client, requests))
    for order in (requests, requests[::-1]):
        together = loop.run(ask_all(client, order))
        assert (together if order is requests else together[::-1]) == alone
    assert alone[2][0][0][0] == [7] * len(alone[2][0][0][0]), "a target is all that is drawn"
    plain = [Ask(ask.prompt, ask.params.clone(extra_args=None)) for ask in requests[1::4]]
    assert loop.run(ask_all(client, plain)) != alone[1::4], "arguments matter"


async def token_ids(client: AsyncClient, **fields: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields})
    return [token async for output in client.generate([3, 4, 5], params) for token in output.outputs[0].token_ids]


def test_one_that_raises_ends_its_own_request(client: AsyncClient, loop: asyncio.Runner) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            token_ids(client),
            token_ids(client, extra_args={"raises_at": 3}),
            token_ids(client, extra_args={"halve": True}),
            return_exceptions=True,
        )

    alone = [loop.run(token_ids(client)), loop.run(token_ids(client, extra_args={"halve": True}))]
    plain, failed, halved = loop.run(main())
    assert isinstance(failed, RequestFailedError)
    assert "ZeroDivisionError: as it was told" in str(failed)
    assert [plain, halved] == alone
    assert loop.run(client.engine_stats()).num_running == 0


def test_wrong_arguments_are_the_callers_fault(client: AsyncClient, loop: asyncio.Runner) -> None:
    with pytest.raises(InvalidRequestError, match="target_token must be an integer") as caught:
        loop.run(token_ids(client, extra_args={"target_token": "seven"}))
    assert caught.value.param == "extra_args"


def test_an_application_may_bring_code_to_its_own_engine(model: Path, loop: asyncio.Runner) -> None:
    class Only(LogitsProcessor):
        """Not in a module that a worker could import, as in a program."""

        def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
            self.token_id = wanted

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            logits[:, self.token_id] = 1e9
            return logits

    wanted = 7

    async def main(**settings: Any) -> list[int]:
        async with AsyncClient.launch(str(model), logits_processors=[Only], **SETTINGS, **settings) as client:
            return await token_ids(client)

    assert loop.run(main(allow_code=True)) == [7] * 8
    with pytest.raises(ConfigError, match="is code"):
        loop.run(main())
    with pytest.raises(ConfigError, match="reachable from others"):
        loop.run(main(allow_code=True, address="tcp://127.0.0.1:0"))


def test_one_that_cannot_be_found_ends_the_start(model: Path, loop: asyncio.Runner) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), logits_processors=["not_a_module:Processor"], **SETTINGS):
            pass

    with pytest.raises(StartupError, match="not_a_module") as caught:
        loop.run(main())
    assert "PYTHONPATH" in caught.value.hint
