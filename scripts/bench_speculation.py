"""Speculative decoding, compared with the same engine without it, on repetitive and non-repetitive texts.

Both engines stay loaded and answer the same prompts in turn for some rounds, so the ratios compare the same minutes. A
first answer to each prompt fills the prefix caches, so almost only decode steps are timed. The tokens of both engines
must be equal.

With --vllm-python vLLM answers the greedy prompts of one request in the same rounds, with its own n-gram drafts.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import counting_checkpoint
import fetch_default_model
from bench_cpu_parts.engines import Vllm
from bench_cpu_parts.session import Session
from bench_cpu_parts.workloads import Workload
from bench_report import MAX_TOKEN_ID, MIN_TOKEN_ID, random_prompt, report, write
from make_bf16_checkpoint import SHAPES

from octavo import LLM, SamplingParams
from octavo.protocol.structured import StructuredOutputsParams

TEXT = (
    "The harbour of Lindwick was built in 1874 by a company of seven merchants. Its two piers enclose a basin of "
    "forty acres, deep enough for ships of nine feet. In winter the lamp on the northern pier is lit at four, and a "
    "bell is rung in fog. Fishermen sell their catch on the stone quay each morning, while the ferry to Marrow Island "
    "leaves at eight and returns at dusk. A storm in 1921 broke the southern pier, and it was rebuilt within a year."
)
MISSPELT = {"piers": "piars", "morning": "mornning", "bell": "bel", "ferry": "fery", "storm": "storme"}
"""Errors in the text to edit. A model of this size corrects some of them, but replaces no word when told to."""

CASES = ("repeat", "edit", "chat", "random", "json", "json-batch")
COUNTING_CASES = ("repeat", "edit", "chat", "random")
"""Cases for a counting model, which cannot follow a schema."""

START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 120.0
"""Limits for the start and for an answer of vLLM, in seconds."""

NUM_COUNTED = 4
"""Number of tokens at the end of the prompt from which a counting model continues."""

EDIT_DISTANCE = 16
"""Number of tokens after which a counting model's repetition of its prompt has a different token."""

TEXT_FIELD = {"type": "string", "maxLength": 24}
ORDER_SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": TEXT_FIELD,
        "email_address": TEXT_FIELD,
        "status": {"enum": ["delivered", "in_transit", "cancelled"]},
        "shipping_address": {
            "type": "object",
            "properties": {"street": TEXT_FIELD, "city": TEXT_FIELD, "postal_code": TEXT_FIELD},
            "required": ["street", "city", "postal_code"],
            "additionalProperties": False,
        },
        "total_price": {"type": "integer", "maximum": 9999},
        "is_paid": {"type": "boolean"},
    },
    "required": ["customer_name", "email_address", "status", "shipping_address", "total_price", "is_paid"],
    "additionalProperties": False,
}
"""Schema for which half of an answer is field names and punctuation."""


@dataclass(frozen=True)
class Case:
    """Requests that are sent together."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def is_for_vllm(self) -> bool:
        """Whether this is a single greedy request without a grammar."""
        return len(self.prompts) == 1 and self.params[0].is_greedy and self.params[0].structured_outputs is None


def main() -> None:
    """Measure the chosen cases and print a table."""
    args = _arguments()
    settings: dict[str, Any] = {"model": args.model, "kv_cache_memory_bytes": 1 << 30, **args.engine}
    with (
        LLM(**settings) as plain,
        LLM(**settings, speculative_config=args.speculative_config) as speculating,
        _vllm(args) as vllm,
    ):
        cases = {name: _case(name, plain, args) for name in args.cases.split(",")}
        results = [_measure(name, case, plain, speculating, vllm, args.rounds) for name, case in cases.items()]
    write(report("bench_speculation", {**settings, "speculative_config": args.speculative_config}, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_speculation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--shape",
        choices=[name for name in SHAPES if name.startswith("qwen2")],
        help="use a counting model of this shape: see scripts/counting_checkpoint.py",
    )
    parser.add_argument("--cases", help="cases separated by commas; default: all that the model supports")
    parser.add_argument(
        "--speculative-config", type=json.loads, default={"method": "ngram"}, metavar="JSON", help="default: ngram"
    )
    parser.add_argument("--vllm-python", type=Path, metavar="FILE", help="Python of an environment with vLLM")
    parser.add_argument(
        "--vllm-speculative-config",
        type=json.loads,
        default={"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        metavar="JSON",
        help="default: %(default)s",
    )
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="settings of both engines")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    parser.add_argument(
        "--num-random", type=int, default=64, help="concurrent requests in the cases random and json-batch"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    if args.shape:
        args.model = str(counting_checkpoint.make_counting(args.shape))
    args.model = args.model or str(fetch_default_model.fetch())
    cases = COUNTING_CASES if args.shape else CASES
    args.cases = args.cases or ",".join(cases)
    if unknown := set(args.cases.split(",")) - set(cases):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    if args.vllm_python and not Path(args.model).is_dir():
        parser.error("--vllm-python needs a --model that is a directory: vLLM reads no .gguf file")
    return args


@contextmanager
def _vllm(args: argparse.Namespace) -> Iterator[Session | None]:
    """Yield a session with vLLM, which is suspended except while it answers; `None` if vLLM is not measured."""
    if args.vllm_python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = {"speculative_config": args.vllm_speculative_config}
        command = Vllm(args.vllm_python).session_of(Path(args.model), settings)
        with Session(command, Path(folder, "vllm.log"), START_LIMIT_S) as session:
            session.rest()
            yield session


def _case(name: str, llm: LLM, args: argparse.Namespace) -> Case:
    temperature = 1.0 if name in ("chat", "random", "json-batch") else 0.0
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.output_len, ignore_eos=True)
    if name == "random":
        rng = random.Random(0)
        return Case([random_prompt(rng, 64) for _ in range(args.num_random)], [params] * args.num_random)
    if args.shape:
        return Case([_counting_prompt(name, args.output_len)], [params])
    if name.startswith("json"):
        params = params.clone(max_tokens=256, structured_outputs=StructuredOutputsParams(json=ORDER_SCHEMA))
    question = {
        "json": f"Invent an order in a web shop. Answer with JSON that follows this schema: {json.dumps(ORDER_SCHEMA)}",
        "repeat": f"Repeat this text word by word:\n\n{TEXT}",
        "edit": f"Repeat this text word by word, but correct the spelling:\n\n{_misspelt(TEXT)}",
        "chat": "What should I see on a first visit to Lisbon, and why?",
    }[name.removesuffix("-batch")]
    (output,) = llm.chat(
        [{"role": "user", "content": question}], params.clone(max_tokens=1, structured_outputs=None), use_tqdm=False
    )
    assert output.prompt_token_ids is not None
    num_requests = args.num_random if name == "json-batch" else 1
    return Case(
        [list(output.prompt_token_ids)] * num_requests, [params.clone(seed=seed) for seed in range(num_requests)]
    )


def _misspelt(text: str) -> str:
    for word, wrong in MISSPELT.items():
        text = text.replace(word, wrong)
    return text


def _counting_prompt(name: str, output_len: int) -> list[int]:
    """Return a prompt whose counting output repeats it, repeats it with some changes, or does not repeat it."""
    first = MIN_TOKEN_ID
    text = list(range(first, first + output_len + NUM_COUNTED))
    if name == "edit":
        text[EDIT_DISTANCE::EDIT_DISTANCE] = [MAX_TOKEN_ID] * len(text[EDIT_DISTANCE::EDIT_DISTANCE])
    if name == "chat":
        text = random_prompt(random.Random(0), len(text))
        first = MAX_TOKEN_ID + 1
    return [*text, *range(first, first + NUM_COUNTED)]


def _measure(name: str, case: Case, plain: LLM, speculating: LLM, vllm: Session | None, rounds: int) -> dict[str, Any]:
    """Answer in both engines in turn; print and return rates, acceptance and tokens per step."""
    (expected, _), (tokens, _) = _answer(plain, case), _answer(speculating, case)
    assert tokens == expected, f"{name}: speculation has changed the tokens"
    before = speculating.stats()
    peer = vllm if case.is_for_vllm else None
    times, vllm_times = [], list[float]()
    for number in range(rounds + 1):
        if number:
            times.append(_round(case, plain, speculating, is_reversed=bool(number % 2)))
        if peer:
            vllm_times.append(_answer_in_vllm(peer, case))  # the first run fills its prefix cache
    after = speculating.stats()
    num_tokens = sum(map(len, expected))
    drafts, drafted, accepted = (
        getattr(after, field) - getattr(before, field)
        for field in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    )
    row = {
        "case": name,
        "plain_tokens_per_s": num_tokens / statistics.median(seconds for seconds, _ in times),
        "speculating_tokens_per_s": num_tokens / statistics.median(seconds for _, seconds in times),
        "ratio": statistics.median(without / with_drafts for without, with_drafts in times),
        "ratios": [without / with_drafts for without, with_drafts in times],
        "accepted_share": accepted / drafted if drafted else None,
        "drafted_share_of_tokens": (accepted + drafts) / (rounds * num_tokens),
        "tokens_per_speculating_step": 1 + accepted / drafts if drafts else None,
    }
    if peer:
        row["vllm_tokens_per_s"] = num_tokens / statistics.median(vllm_times[1:])
        row["ratios_to_vllm"] = [one / own for one, (_, own) in zip(vllm_times[1:], times, strict=True)]
    print(
        f"{name:8} {row['plain_tokens_per_s']:8.1f} -> {row['speculating_tokens_per_s']:8.1f} tokens/s  "
        f"{row['ratio']:5.2f} x ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})  "
        f"accepted {accepted} of {drafted} draft tokens in {drafts} drafts",
        flush=True,
    )
    if peer:
        ratios = row["ratios_to_vllm"]
        print(
            f"{'':8} vLLM with its drafts {row['vllm_tokens_per_s']:.1f} tokens/s: "
            f"octavo has {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return row


def _round(case: Case, plain: LLM, speculating: LLM, *, is_reversed: bool) -> tuple[float, float]:
    """Return the seconds of both engines; the first one alternates."""
    if is_reversed:
        speculating_s = _answer(speculating, case)[1]
        return _answer(plain, case)[1], speculating_s
    return _answer(plain, case)[1], _answer(speculating, case)[1]


def _answer_in_vllm(vllm: Session, case: Case) -> float:
    """Return the seconds that vLLM needs for as many tokens; vLLM is suspended before and after."""
    vllm.wake()
    seconds = vllm.generate(Workload(case.prompts, [params.max_tokens or 0 for params in case.params]), ANSWER_LIMIT_S)
    vllm.rest()
    return seconds


def _answer(llm: LLM, case: Case) -> tuple[list[list[int]], float]:
    """Return the tokens of each request, and the seconds for all requests."""
    started = time.perf_counter()
    outputs = llm.generate(case.prompts, case.params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    return [list(output.outputs[0].token_ids) for output in outputs], elapsed


if __name__ == "__main__":
    main()
