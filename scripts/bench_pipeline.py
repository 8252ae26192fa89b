"""How long the stages of a pipeline wait: real processes and the real core, with stages that sleep for a known time.

There are 8 callers for each stage. Each sends its next request when the last one has finished. The bubble is the
fraction of the stages' time that they spend waiting, from the end of the first requests until the last one is sent.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from bench_core_parts.engine import TIMEOUT_S, Client
from bench_core_parts.messages import engine_config, prompt_of, submission
from bench_pipeline_parts.stage_worker import TIME_VARIABLE
from bench_report import report, write

from octavo.protocol.control import CoreReady, CoreSpec
from octavo.protocol.supervise import Child

PROMPT_TOKENS = (50, 800)
OUTPUT_TOKENS = (10, 60)
CALLERS_PER_STAGE = 8


def main() -> None:
    """Measure each number of stages and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench_pipeline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="milliseconds of a step on each stage, without its tokens"
    )
    parser.add_argument("--token-ms", type=float, default=0.1, help="milliseconds per token on each stage")
    parser.add_argument("--requests", type=int, default=24, help="number of requests for each stage")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    results = [measure(num_stages, args) for num_stages in args.stages]
    settings = {"step_ms": args.step_ms, "token_ms": args.token_ms, "requests": args.requests}
    write(report("bench_pipeline", settings, results), args.json)


def measure(num_stages: int, args: argparse.Namespace) -> dict[str, float]:
    """Run the load on a pipeline and return how busy its stages were."""
    config = engine_config(
        num_blocks=8192,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        full_step_tokens=64,
        decode_interval_tokens=512,
        step_time_target_s=0.0,
        pipeline_parallel_size=num_stages,
        world_size=num_stages,
    )
    with tempfile.TemporaryDirectory(prefix="bench_pipeline-") as run_dir:
        spec = CoreSpec(config=config, address=f"ipc://{run_dir}/core", run_dir=run_dir, epoch=1, log_level="ERROR")
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        stage_s = f"{args.step_ms / 1000},{args.token_ms / 1000}"
        core = Child.spawn(
            "bench_pipeline_parts.core_process", spec, "core", environment={"PYTHONPATH": path, TIME_VARIABLE: stage_s}
        )
        try:
            while not isinstance(core.receive(TIMEOUT_S), CoreReady):
                pass
            begin_s, end_s = serve(spec.address, CALLERS_PER_STAGE * num_stages, args.requests * num_stages)
            core.stop(timeout_s=30.0)
            busy = [json.loads((Path(run_dir) / f"stage-{rank}.json").read_text()) for rank in range(num_stages)]
        finally:
            core.kill()
            core.wait()
            core.close()
    parts = [max(0.0, min(end, end_s) - max(begin, begin_s)) for steps in busy for begin, end in steps]
    bubble = 1.0 - sum(parts) / (num_stages * (end_s - begin_s))
    num_steps = sum(begin_s <= begin < end_s for begin, _ in busy[0])
    seconds = end_s - begin_s
    print(f"{num_stages} stages: {100 * bubble:.1f} % of the time waiting, {num_steps} steps in {seconds:.1f} s")
    return {"stages": num_stages, "bubble": bubble, "steps": num_steps, "seconds": seconds}


def serve(address: str, num_callers: int, num_requests: int) -> tuple[float, float]:
    """Run all callers; return when the first requests had finished and when the last one was sent."""
    rng, client = random.Random(0), Client(address)
    num_sent, begin_s, end_s = 0, 0.0, 0.0
    try:
        while client.num_ended < num_requests:
            while num_sent < min(num_requests, num_callers + client.num_ended):
                prompt = prompt_of(num_sent, rng.randint(*PROMPT_TOKENS))
                client.send(submission(f"r{num_sent}", prompt, rng.randint(*OUTPUT_TOKENS)))
                num_sent += 1
                end_s = time.monotonic()
            if client.receive(TIMEOUT_S) is None:
                raise TimeoutError("the engine sends nothing")
            if not begin_s and client.num_ended >= num_callers:
                begin_s = time.monotonic()
    finally:
        client.close()
    return begin_s, end_s


if __name__ == "__main__":
    main()
