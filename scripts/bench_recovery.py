"""How long requests pause when a process of the engine is killed, and whether their tokens are unchanged.

While streams run, the core or its worker is killed with SIGKILL. The pause of a stream is the time between its last
token before the kill and its first token after it. The tokens are compared with an undisturbed run.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import fetch_default_model
from bench_report import MAX_TOKEN_ID, random_prompt, report, summary, write

from octavo import AsyncClient, SamplingParams


def main() -> None:
    """Run the selected measurements and print a table."""
    args = _arguments()
    model = args.model or str(fetch_default_model.fetch())
    settings = dict(text.split("=", 1) for text in args.engine)
    results = asyncio.run(_measure(model, settings, args))
    write(report("bench_recovery", {"model": model, **settings}, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--victim", choices=["core", "worker"], default="core", help="process to kill")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=256, help="tokens to generate per request")
    parser.add_argument("--kills", type=int, default=3, help="number of runs with a kill")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    return parser.parse_args()


async def _measure(model: str, settings: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(0)
    prompts = [random_prompt(rng, args.input_len, MAX_TOKEN_ID) for _ in range(args.streams)]
    results = []
    async with AsyncClient.launch(model, **settings) as client:
        expected, _ = await _run(client, prompts, args.output_len, victim=None)
        print(f"{'run':>4} {'pause median':>13} {'longest':>9} {'same tokens':>12}")
        for number in range(args.kills):
            got, pauses = await _run(client, prompts, args.output_len, victim=args.victim)
            result = {"pauses_s": summary(pauses), "longest_s": max(pauses), "is_same": got == expected}
            results.append(result)
            median_s = result["pauses_s"]["median"]
            print(f"{number + 1:>4} {median_s:>11.2f} s {max(pauses):>7.2f} s {result['is_same']!s:>12}", flush=True)
    return results


async def _run(
    client: AsyncClient, prompts: list[list[int]], output_len: int, *, victim: str | None
) -> tuple[list[list[int]], list[float]]:
    """Run all prompts; return their tokens and, if a process is killed, the longest pause of each stream in seconds."""
    half_way = asyncio.Event()
    silences = [0.0] * len(prompts)

    async def one(index: int) -> list[int]:
        params = SamplingParams(max_tokens=output_len, seed=index, ignore_eos=True)
        tokens: list[int] = []
        last_s = 0.0
        async for output in client.generate(prompts[index], params):
            now_s = time.monotonic()
            if tokens:
                silences[index] = max(silences[index], now_s - last_s)
            last_s = now_s
            tokens += output.outputs[0].token_ids
            if len(tokens) >= output_len // 2:
                half_way.set()
        return tokens

    running = asyncio.gather(*(one(index) for index in range(len(prompts))))
    if victim:
        await half_way.wait()
        assert client.engine is not None
        core = client.engine.core_pid
        os.kill(core if victim == "core" else _worker_of(core), signal.SIGKILL)
    return await running, silences


def _worker_of(core: int) -> int:
    """Return the process id of a core's first worker."""
    children = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    return next(int(pid) for pid in children if b"octavo.worker_proc" in Path(f"/proc/{pid}/cmdline").read_bytes())


if __name__ == "__main__":
    main()
