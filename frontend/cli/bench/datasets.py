"""Workloads: the prompts of a benchmark, and the lengths of its outputs.

The flags are those of `vllm bench`.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octavo.frontend.cli.bench.rows import SUFFIXES, prompts_in
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser

LETTERS_PER_TOKEN = 3
"""Approximate number of characters per token of random text."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "

SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT_TOKENS = 1024
SHAREGPT_MAX_TOKENS = 2048


class Tokenizer(Protocol):
    """Counts tokens and truncates text: the model's tokenizer, local or on a server."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True)
class SampleRequest:
    """One request of a workload."""

    prompt: str
    max_tokens: int


def add_dataset_flags(parser: CommandParser) -> None:
    """Add the flags that describe the workload."""
    group = parser.add_named_group("dataset", "The workload")
    group.add_argument(
        "--dataset-name", choices=list(_DATASETS), default="random", help="source of the prompts; default: random"
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="sharegpt: a JSON list of conversations; custom: a line for each prompt, "
        '{"prompt": "...", "output_tokens": 100}, output_tokens optional; hf: a data set of the hub on this machine, '
        f"a file or a directory of {' '.join(SUFFIXES)}",
    )
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="number of requests; default: 100")
    group.add_argument("--input-len", type=int, metavar="N", help="prompt tokens, for any dataset")
    group.add_argument("--output-len", type=int, metavar="N", help="output limit in tokens, for any dataset")
    numbers = {
        "--random-input-len": (1024, "random: prompt tokens"),
        "--random-output-len": (128, "random: output tokens"),
        "--random-prefix-len": (0, "random: tokens that open every prompt, on top of its own"),
        "--prefix-repetition-prefix-len": (256, "prefix_repetition: tokens of each shared prefix"),
        "--prefix-repetition-suffix-len": (256, "prefix_repetition: tokens of each prompt after its prefix"),
        "--prefix-repetition-num-prefixes": (10, "prefix_repetition: how many different prefixes"),
        "--prefix-repetition-output-len": (128, "prefix_repetition: output tokens"),
        "--hf-output-len": (128, "hf: output tokens"),
        "--custom-output-len": (256, "custom: output tokens of prompts that do not say"),
    }
    for flag, (default, text) in numbers.items():
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default: {default}")
    group.add_argument(
        "--hf-prompt-column", metavar="NAME", help="hf: column of the prompts; default: detected by name"
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="random: lengths are uniform between 1 - X and 1 + X times the length; default: 0",
    )


def draw_samples(options: argparse.Namespace, tokenizer: Tokenizer, seed: int) -> list[SampleRequest]:
    """Return the workload that the flags describe. The seed determines it.

    Raises:
        CommandError: the flags contradict each other, or a file is invalid.
    """
    if options.num_prompts < 1:
        raise CommandError("--num-prompts must be 1 or more")
    for name in ("input_len", "output_len"):
        if (length := getattr(options, name)) is not None and length < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be 1 or more")
    if not 0 <= options.random_range_ratio < 1:
        raise CommandError("--random-range-ratio must be at least 0 and below 1")
    return _DATASETS[options.dataset_name](options, tokenizer, random.Random(seed))


def random_texts(rng: random.Random, tokenizer: Tokenizer, lengths: list[int]) -> list[str]:
    """Return texts of random letters with approximately these lengths in tokens. No two texts share a prefix."""
    num_tokens = sum(lengths)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        num_letters = LETTERS_PER_TOKEN * (num_tokens - len(token_ids))
        token_ids += tokenizer.encode("".join(rng.choices(_LETTERS, k=num_letters)))
    texts, start = [], 0
    for length in lengths:
        texts.append(tokenizer.decode(token_ids[start : start + length]))
        start += length
    return texts


def _random(options: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    def spread(length: int) -> int:
        ratio = options.random_range_ratio
        return max(1, round(length * rng.uniform(1 - ratio, 1 + ratio)))

    input_lens = [spread(options.input_len or options.random_input_len) for _ in range(options.num_prompts)]
    output_lens = [spread(options.output_len or options.random_output_len) for _ in range(options.num_prompts)]
    prefix = random_texts(rng, tokenizer, [options.random_prefix_len])[0] if options.random_prefix_len else ""
    texts = random_texts(rng, tokenizer, input_lens)
    return [SampleRequest(prefix + text, length) for text, length in zip(texts, output_lens, strict=True)]


def _prefix_repetition(options: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    num_prefixes = options.prefix_repetition_num_prefixes
    if num_prefixes < 1:
        raise CommandError("--prefix-repetition-num-prefixes must be 1 or more")
    prefix_len, suffix_len = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    if options.input_len:
        prefix_len, suffix_len = options.input_len // 2, options.input_len - options.input_len // 2
    prefixes = random_texts(rng, tokenizer, [prefix_len] * num_prefixes)
    suffixes = random_texts(rng, tokenizer, [suffix_len] * options.num_prompts)
    output_len = options.output_len or options.prefix_repetition_output_len
    samples = [
        SampleRequest(prefixes[number % num_prefixes] + suffix, output_len) for number, suffix in enumerate(suffixes)
    ]
    rng.shuffle(samples)
    return samples


def _sharegpt(options: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    """Use the first turn of each conversation as the prompt, and the length of the second as the output length."""
    try:
        conversations = json.loads(_text(options))
        turns = [
            (entry["conversations"][0]["value"], entry["conversations"][1]["value"])
            for entry in conversations
            if len(entry.get("conversations") or []) >= 2
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommandError(f"{options.dataset_path} is not a ShareGPT file (a JSON list of conversations)") from None
    rng.shuffle(turns)
    samples: list[SampleRequest] = []
    for prompt, answer in turns:
        input_len = len(tokenizer.encode(prompt))
        output_len = options.output_len or len(tokenizer.encode(answer))
        is_long = input_len > SHAREGPT_MAX_PROMPT_TOKENS or input_len + output_len > SHAREGPT_MAX_TOKENS
        if min(input_len, output_len) < SHAREGPT_MIN_TOKENS or is_long:
            continue
        samples.append(SampleRequest(prompt, output_len))
        if len(samples) == options.num_prompts:
            return samples
    raise CommandError(
        f"{options.dataset_path} has {len(samples)} usable conversations", f"--num-prompts {len(samples)}"
    )


def _hf(options: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    prompts = list(prompts_in(_path(options), options.hf_prompt_column))
    if len(prompts) < options.num_prompts:
        raise CommandError(f"{options.dataset_path} has {len(prompts)} prompts", f"--num-prompts {len(prompts)}")
    output_len = options.output_len or options.hf_output_len
    return [SampleRequest(prompt, output_len) for prompt in rng.sample(prompts, options.num_prompts)]


def _custom(options: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    samples = [
        SampleRequest(entry["prompt"], options.output_len or entry.get("output_tokens") or options.custom_output_len)
        for entry in _json_lines(options)
    ]
    if len(samples) < options.num_prompts:
        raise CommandError(f"{options.dataset_path} has {len(samples)} prompts", f"--num-prompts {len(samples)}")
    return samples[: options.num_prompts]


def _json_lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(options).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise CommandError(f'line {number} of {options.dataset_path} is not {{"prompt": "..."}}')
        yield entry


def _path(options: argparse.Namespace) -> Path:
    if options.dataset_path is None:
        raise CommandError(f"--dataset-name {options.dataset_name} reads a file", "name it with --dataset-path")
    return Path(options.dataset_path)


def _text(options: argparse.Namespace) -> str:
    try:
        return _path(options).read_text("utf-8")
    except OSError as error:
        raise CommandError(f"cannot read {options.dataset_path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{options.dataset_path} is not UTF-8 text") from None


_DATASETS: dict[str, Callable[[argparse.Namespace, Tokenizer, random.Random], list[SampleRequest]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "hf": _hf,
}
