"""Conversations with vLLM through `AsyncLLM`, in vLLM's own Python.

argument    a JSON object: `model`, and `settings` for the engine
output      {}, once the engine is warm; then the fields of `Run`
input       {"conversations": [[the tokens of each turn], ...], "output_tokens": ...}
"""

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, TextIO

from bench_cpu_parts.drive_loop import claim_output

from bench_kv_offloading_parts.conversations import converse


async def _serve(options: dict[str, Any], replies: TextIO) -> None:
    # Imported here, because vLLM's child processes import this file again.
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=options["model"], **options["settings"]))
    numbers = itertools.count()

    async def generate(prompt: list[int], max_tokens: int) -> AsyncIterator[tuple[Sequence[int], int]]:
        params = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(next(numbers))):
            yield output.outputs[0].token_ids, output.num_cached_tokens or 0

    async for _ in generate(list(range(10, 26)), 2):
        pass
    print("{}", file=replies)
    job = json.loads(sys.stdin.readline())
    run = await converse(generate, job["conversations"], job["output_tokens"])
    print(json.dumps(dataclasses.asdict(run)), file=replies)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1]), claim_output()))
