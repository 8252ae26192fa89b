"""Time to the first token of an engine that receives a prompt's KV blocks, compared with one that computes them.

Both engines run on this machine; the prefill engine is idle while the decode engine is measured. Meanwhile one stream
decodes on the decode engine: the longest time between two of its tokens shows how much a prompt disturbs others.
"""

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import fetch_default_model
from bench_report import random_prompt, report, summary, write

from octavo import AsyncClient, SamplingParams
from octavo.frontend.cli.main import main as octavo

WAYS = ("compute", "shared memory", "tcp")
BYSTANDER_TOKENS = 4000


def main() -> None:
    """Run all ways and print a table."""
    args = _arguments()
    model = args.model or str(fetch_default_model.fetch())
    settings: dict[str, Any] = {name: _value(text) for name, text in (one.split("=", 1) for one in args.engine)}
    results = asyncio.run(_measure(model, settings, args))
    write(report("bench_transfer", {"model": model, **settings}, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_transfer", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="a setting of both engines")
    parser.add_argument("--input-len", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--prompts", type=int, default=5, help="prompts for each of the ways")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    return parser.parse_args()


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text


async def _measure(model: str, settings: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(0)
    results = []
    async with AsyncExitStack() as stack:
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        octavo(["keygen", "group", "--directory", str(keys)])
        settings = {**settings, "group_secret_key_file": str(keys / "group.key_secret")}
        giver, remote_giver, taker = [
            await stack.enter_async_context(AsyncClient.launch(model, **settings, kv_transfer_config=_role(**fields)))
            for fields in ({"role": "kv_producer"}, {"role": "kv_producer", "ip": "127.0.0.1"}, {"role": "kv_consumer"})
        ]
        print(f"{'way':>14} {'first token':>12} {'longest gap of another stream':>30} {'same tokens':>12}")
        for way in WAYS:
            first_tokens, gaps, are_same = [], [], True
            for _ in range(args.prompts):
                prompt = random_prompt(rng, args.input_len)
                params = None if way == "compute" else await _prefill(remote_giver if way == "tcp" else giver, prompt)
                first_s, gap_s, tokens = await _beside_a_stream(taker, prompt, params)
                first_tokens.append(first_s)
                gaps.append(gap_s)
                are_same &= tokens == (await _generate(taker, prompt, None, reads_cache=False))[1]
            result = {"way": way, "first_token_s": summary(first_tokens), "gap_s": summary(gaps), "is_same": are_same}
            results.append(result)
            first_ms, gap_ms = 1000 * summary(first_tokens)["median"], 1000 * summary(gaps)["median"]
            print(f"{way:>14} {first_ms:>9.1f} ms {gap_ms:>27.1f} ms {are_same!s:>12}", flush=True)
    return results


def _role(role: str, ip: str | None = None) -> dict[str, Any]:
    return {"kv_connector": "OctavoConnector", "kv_role": role, **({"kv_ip": ip} if ip else {})}


async def _prefill(giver: AsyncClient, prompt: list[int]) -> dict[str, Any]:
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    async for output in giver.generate(prompt, params):
        if output.finished:
            assert output.kv_transfer_params is not None
            return output.kv_transfer_params
    raise AssertionError("the prefill has not finished")


async def _generate(
    client: AsyncClient, prompt: list[int], kv_transfer_params: dict[str, Any] | None, *, reads_cache: bool = True
) -> tuple[float, list[int]]:
    """Return the time to the first token in seconds, and the tokens."""
    extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    params = SamplingParams(
        max_tokens=16, seed=1, ignore_eos=True, extra_args=extra_args, skip_reading_prefix_cache=not reads_cache
    )
    start_s, first_s, tokens = time.monotonic(), 0.0, list[int]()
    async for output in client.generate(prompt, params):
        first_s = first_s or time.monotonic() - start_s
        tokens += output.outputs[0].token_ids
    return first_s, tokens


async def _beside_a_stream(
    client: AsyncClient, prompt: list[int], kv_transfer_params: dict[str, Any] | None
) -> tuple[float, float, list[int]]:
    """Do the same while another stream runs; also return, in the middle, that stream's longest gap in seconds."""
    has_begun, gap_s = asyncio.Event(), 0.0

    async def stream() -> None:
        nonlocal gap_s
        last_s, params = 0.0, SamplingParams(max_tokens=BYSTANDER_TOKENS, ignore_eos=True)
        async for output in client.generate([7] * 8, params):
            now_s = time.monotonic()
            if last_s:
                gap_s = max(gap_s, now_s - last_s)
            last_s = now_s
            if output.outputs[0].token_ids:
                has_begun.set()

    bystander = asyncio.create_task(stream())
    await has_begun.wait()
    await asyncio.sleep(0.1)
    gap_s = 0.0
    first_s, tokens = await _generate(client, prompt, kv_transfer_params)
    bystander.cancel()
    await asyncio.gather(bystander, return_exceptions=True)
    return first_s, gap_s, tokens


if __name__ == "__main__":
    main()
