"""Compares a model that runs through transformers in octavo with `generate` of transformers, in one run.

Both have random weights of the same shape and the same prompts, and take turns; an idle engine uses no processor time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from octavo import LLM, SamplingParams

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
PROMPT_TOKENS = 32
BATCH = 32


def main() -> None:
    """Run all cells in turns, and print the rates and their ratios."""
    args = _arguments()
    model_class = getattr(transformers, args.architecture)
    config = model_class.config_class(**SHAPE, architectures=[args.architecture], dtype=args.dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, SHAPE["vocab_size"], (BATCH, PROMPT_TOKENS), generator=generator)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        engine = LLM(
            model=str(Path(directory)),
            load_format="dummy",
            dtype=args.dtype,
            skip_tokenizer_init=True,
            model_impl=args.model_impl,
            max_model_len=512,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
            num_gpu_blocks_override=1024,
        )
        theirs = model_class(config).to(getattr(torch, args.dtype)).eval()
        cells: dict[str, Callable[[], None]] = {
            "transformers, 1": lambda: _generate(theirs, prompts[:1], args.tokens),
            "octavo, 1": lambda: _serve(engine, prompts[:1], args.tokens),
            f"transformers, {BATCH}": lambda: _generate(theirs, prompts, args.tokens),
            f"octavo, {BATCH}": lambda: _serve(engine, prompts, args.tokens),
        }
        rates = _measure(cells, args)
    for name, rate in rates.items():
        print(f"{name:18} {rate:8.1f} tokens/s")
    alone, batch = rates["transformers, 1"], rates[f"transformers, {BATCH}"]
    print(f"alone: {rates['octavo, 1'] / alone:.2f} x generate alone")
    print(f"{BATCH} at once: {rates[f'octavo, {BATCH}'] / alone:.2f} x generate alone", end=", ")
    print(f"{rates[f'octavo, {BATCH}'] / batch:.2f} x generate of a batch of {BATCH}")


def _measure(cells: dict[str, Callable[[], None]], args: argparse.Namespace) -> dict[str, float]:
    """Return the median of the rates in generated tokens per second; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in cells}
    for round_number in range(args.rounds + 1):
        for name, run in cells.items():
            started = time.perf_counter()
            run()
            elapsed_s = time.perf_counter() - started
            print(f"round {round_number}: {name}: {elapsed_s:.2f} s", flush=True)
            if round_number:
                seconds[name].append(elapsed_s)
    return {
        name: args.tokens * int(name.rpartition(" ")[2]) / statistics.median(times) for name, times in seconds.items()
    }


@torch.inference_mode()
def _generate(model: transformers.PreTrainedModel, prompts: torch.Tensor, num_tokens: int) -> None:
    out = model.generate(prompts, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    assert out.shape[1] == prompts.shape[1] + num_tokens, "generate stopped early"


def _serve(engine: LLM, prompts: torch.Tensor, num_tokens: int) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": row} for row in prompts.tolist()], greedy, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), "octavo stopped early"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--architecture",
        default="SeedOssForCausalLM",
        help="class of transformers whose configuration has keys like Llama's",
    )
    parser.add_argument("--model-impl", default="transformers", choices=["auto", "octavo", "transformers"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after a warm-up round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
