"""`octavo quantize`: writes a checkpoint with fewer bits, and reports the loss of quality.

The frontend must not import torch, so a child process does the work: `python -m octavo.worker_proc.quantization`.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
from tqdm import tqdm

from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.frontend.evaluation.quality import Reading, fixed_text, read
from octavo.frontend.model_files.locate import locate_model
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env
from octavo.protocol.quantization_job import (
    CALIBRATED,
    Failed,
    Finished,
    Format,
    GgufType,
    Progress,
    QuantizationJob,
    Report,
)

_FORMATS_OF: dict[str, tuple[Format, ...]] = {
    "group_size": ("int4", "gptq", "awq"),
    "calibration": ("gptq", "awq"),
    "num_samples": ("gptq", "awq"),
    "sample_tokens": ("gptq", "awq"),
    "desc_act": ("gptq",),
    "gguf_type": ("gguf",),
}
"""The formats for which a flag is valid; other flags are valid for all formats."""

_DESCRIPTION = """\
Write a copy of MODEL, a checkpoint in Hugging Face layout, with fewer bits for the weights of its linear layers.

  int8   8 bits, a scale for each output; activations are rounded to 8 bits as well (compressed-tensors)
  int4   4 bits, a scale for each group of inputs (compressed-tensors)
  fp8    float8_e4m3fn, a scale for each output; activations as well (compressed-tensors)
  gptq   4 bits; the rounding of an input makes up for the errors of those before it; reads --calibration
  awq    4 bits; inputs with large activations are rounded more precisely; reads --calibration
  gguf   a file for llama.cpp, of the type --gguf-type

At the end both models read a text, and the command prints their perplexity and how often they agree."""


def parser() -> CommandParser:
    """Return the flags of `octavo quantize`."""
    parser = CommandParser("octavo quantize", _DESCRIPTION, "MODEL OUT --format FORMAT [FLAG ...]")
    parser.add_argument("model", metavar="MODEL", help="directory or hub id (org/name)")
    parser.add_argument("out", metavar="OUT", help="a new directory; a .gguf file for --format gguf")
    parser.add_argument("--format", choices=get_args(Format), required=True, help="one of those above")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="inputs that share a scale (int4, gptq, awq); default: 128",
    )
    parser.add_argument("--calibration", metavar="FILE", help="a text like those that the model will read (gptq, awq)")
    parser.add_argument("--num-samples", type=int, metavar="N", help="pieces of that text; default: 128")
    parser.add_argument("--sample-tokens", type=int, metavar="N", help="tokens of a piece; default: 512")
    parser.add_argument(
        "--desc-act", action="store_true", default=None, help="round inputs with large activations first (gptq)"
    )
    parser.add_argument("--gguf-type", choices=get_args(GgufType), help="default: Q8_0")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--evaluation-text",
        metavar="FILE",
        help="what both models read at the end; default: a text of about a thousand words",
    )
    parser.add_argument("--no-evaluation", action="store_true", help="do not compare the models")
    return parser


def run(argv: list[str]) -> int:
    """Quantize a checkpoint; return the exit code.

    Raises:
        CommandError: the model cannot be quantized with these options.
        ConfigError: the model does not exist.
        StartupError: one of the models cannot be evaluated; the checkpoint is kept.
    """
    options = parser().parse(argv)
    _check(options)
    source = locate_model(ModelConfig(model=options.model, revision=options.revision), Env.read())
    out = Path(options.out).expanduser().resolve()
    text = _evaluation_text(options.evaluation_text)
    metadata = _gguf_metadata(source) if options.format == "gguf" else {}
    given = {field: value for field in _FORMATS_OF if (value := getattr(options, field)) is not None}
    if given.pop("desc_act", False):
        given["orders_by_activation"] = True
    job = QuantizationJob(source=str(source), out=str(out), format=options.format, gguf_metadata=metadata, **given)
    finished = do(job)
    print(f"{out}\n{finished.num_layers} layers quantized, {finished.num_bytes / 1e6:,.1f} MB")
    if not options.no_evaluation:
        print(compared(evaluate_model(str(source), text), evaluate_model(str(out), text)))
    return 0


def do(job: QuantizationJob) -> Finished:
    """Run the child process, and show its progress on a terminal.

    Raises:
        CommandError: the job failed; the message has the reason.
    """
    command = [sys.executable, "-P", "-m", "octavo.worker_proc.quantization"]
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        tqdm(total=100, desc=job.format, bar_format=bar_format, disable=not sys.stderr.isatty()) as bar,
    ):
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(job))
        child.stdin.close()
        for line in child.stdout:
            match msgspec.json.decode(line, type=Report):
                case Progress(fraction):
                    bar.update(max(0.0, 100 * fraction - bar.n))
                case Failed(message, hint):
                    raise CommandError(message, hint)
                case Finished() as finished:
                    return finished
    raise CommandError(f"the process that quantizes ended with exit code {child.returncode}", "its error is above")


def evaluate_model(model: str, text: str) -> Reading:
    """Start an engine for a model, and evaluate the text with it.

    Raises:
        StartupError: the engine cannot start.
    """
    from octavo.frontend.llm import LLM

    with LLM(model, max_num_seqs=4) as llm:
        return read(llm, text)


def compared(original: Reading, quantized: Reading) -> str:
    """Return two lines: the perplexities, and how often both models predict the same token."""
    change = quantized.perplexity / original.perplexity - 1
    return (
        f"perplexity {original.perplexity:.3f} -> {quantized.perplexity:.3f} ({change:+.2%}), "
        f"{len(original.logprobs)} tokens\n"
        f"the same token is the likeliest in {original.agreement(quantized):.1%}"
    )


def _check(options: argparse.Namespace) -> None:
    if options.format in CALIBRATED and options.calibration is None:
        raise CommandError(f"--format {options.format} needs --calibration FILE", "a text of some 100,000 tokens")
    for field, formats in _FORMATS_OF.items():
        if getattr(options, field) is not None and options.format not in formats:
            flag = f"--{field.replace('_', '-')}"
            raise CommandError(f"--format {options.format} has no {flag}", f"leave it out, or use {', '.join(formats)}")
    if options.group_size is not None and (options.group_size < 16 or options.group_size % 16):
        raise CommandError("--group-size must be a multiple of 16")
    for field, least in (("num_samples", 1), ("sample_tokens", 16)):
        if (value := getattr(options, field)) is not None and value < least:
            raise CommandError(f"--{field.replace('_', '-')} must be {least} or more")
    if (options.format == "gguf") != options.out.endswith(".gguf"):
        raise CommandError("OUT must be a .gguf file for --format gguf, and for no other format")


def _gguf_metadata(source: Path) -> dict[str, Any]:
    from octavo.frontend.model_files.gguf.export import gguf_metadata  # imported here: it loads tokenizers

    return gguf_metadata(source)


def _evaluation_text(path: str | None) -> str:
    if path is None:
        return fixed_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--evaluation-text {path}: {error}") from error
