"""The time of a decode step per active parameter: every family of models compared with Llama at the same size.

One request with 128 keys, native programs, random weights in bfloat16, one process. The families take turns with Llama,
so other load on the machine affects both alike. A round takes the fastest of some steps; every step has another token,
and so other experts. The ratio is the median over the rounds. With one thread, processor time is measured, which other
load changes less.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from bench_report import report, write
from profile_step import BAR_WIDTH, NUM_BLOCKS, Case

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.native.library import load
from octavo.protocol.config import resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.step_arguments import step_arguments
from octavo.worker_proc.runners.native.open import build_programs
from octavo.worker_proc.runners.native.programs import NativePrograms
from octavo.worker_proc.weights.load import load_model

TARGET = 1.15
CASE = Case(num_requests=1, num_tokens=1, context_len=128)
STEPS = 8
"""Number of steps in a round."""

_WIDTH, _INNER, _LAYERS, _VOCAB = 1024, 2816, 12, 32_000
_BASE = {
    "vocab_size": _VOCAB,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_BASE, "head_dim": 64}
_PLAIN = {**_BASE, "intermediate_size": _INNER * 3 // 2}
"""Settings of an MLP without a gate that has as many weights as the others."""
_OLD = {key: value for key, value in _BASE.items() if key not in ("num_key_value_heads", "intermediate_size")}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": _INNER // 8}
_FEW_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": _INNER // 2}
_LATENT = {
    **_BASE,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": _INNER // 8,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_SSM = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2}
_MIXED = (["linear_attention"] * 3 + ["full_attention"]) * (_LAYERS // 4)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _HEADS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _BASE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_HEADS, "query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_HEADS, "sliding_window": 512}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _BASE),
    "phi": ("PhiForCausalLM", "PhiConfig", _PLAIN),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_PLAIN, "num_key_value_heads": 16}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_BASE, "residual_multiplier": 0.22}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {**_BASE, "clip_qkv": 8.0}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _BASE),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _BASE),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_BASE, "use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**_BASE, "sliding_window": 512}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _PLAIN),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _HEADS),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**_HEADS, "sliding_window": 512}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_OLD, "multi_query": True}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": _VOCAB, "hidden_size": _WIDTH, "n_layer": _LAYERS, "n_head": 16},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": _VOCAB, "d_model": _WIDTH, "n_layers": _LAYERS, "n_heads": 16},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": _VOCAB, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": 16, "n_positions": 4096},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_OLD, "word_embed_proj_dim": _WIDTH, "ffn_dim": _INNER * 3 // 2},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_HEADS, **_FEW_EXPERTS}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_BASE, **_EXPERTS, "num_experts_per_tok": 4, "shared_expert_intermediate_size": _INNER // 2},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_HEADS, **_EXPERTS}),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**_BASE, "num_experts": 32, "num_experts_per_tok": 8, "intermediate_size": _INNER // 8},
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {**_BASE, **_FEW_EXPERTS, "num_local_experts": 32, "num_experts_per_tok": 8, "intermediate_size": _INNER // 8},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**_HEADS, **_EXPERTS, "n_routed_experts": 32, "num_experts_per_tok": 7},
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**_HEADS, **_FEW_EXPERTS, "sliding_window": 128}),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 384, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": _VOCAB,
            "hidden_size": _WIDTH,
            "num_hidden_layers": 2 * _LAYERS,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_SSM,
            "layer_types": _MIXED,
            "shared_intermediate_size": _INNER,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **_BASE,
            "layer_types": ["conv", "conv", "full_attention"] * (_LAYERS // 3),
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_HEADS,
            **_EXPERTS,
            "num_experts_per_tok": 6,
            "shared_expert_intermediate_size": _INNER // 4,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**_HEADS, **_SSM, "mamba_d_ssm": 2048},
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_PLAIN,
            "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp"] * (_LAYERS // 3),
            "num_hidden_layers": 2 * _LAYERS,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 1,
            "head_dim": 64,
        },
    ),
}
"""Architecture, configuration class and settings of each family, by name. About 170 million active parameters each."""


def main() -> None:
    """Measure the families of the command line, print a line for each, and fail if one is too slow."""
    args = _arguments()
    baseline = _Candidate.build("llama", args)
    results = []
    print(f"llama: {baseline.parameters / 1e6:.0f} million active parameters", flush=True)
    for name in args.only or [name for name in FAMILIES if name != "llama"]:
        candidate = _Candidate.build(name, args)
        results.append(_compare(name, candidate, baseline, args))
        del candidate
        gc.collect()
    slow = [result["family"] for result in results if result["ratio"] > TARGET]
    print(f"more than {TARGET} of Llama: {', '.join(slow) or 'none'}")
    write(report("bench_families.py", {"rounds": args.rounds, "threads": args.num_threads}, results), args.json)
    sys.exit(bool(slow))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_families.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=_names, metavar="FAMILY,...", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--num-threads", type=int, help="default: number of cores")
    parser.add_argument("--operations", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - FAMILIES.keys():
        raise argparse.ArgumentTypeError(f"no such family: {', '.join(sorted(unknown))}")
    return names


@dataclass
class _Candidate:
    forward: NativePrograms
    steps: list[StepInputs]
    """Inputs of the steps of a round."""
    num_threads: int

    @classmethod
    def build(cls, name: str, args: argparse.Namespace) -> "_Candidate":
        """Return a candidate: a model with random weights."""
        architecture, class_name, settings = FAMILIES[name]
        config = getattr(transformers, class_name)(**settings).to_dict()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
            user_config = engine_config(
                {
                    "model": directory,
                    "load_format": "dummy",
                    "dtype": "bfloat16",
                    "num_threads": args.num_threads,
                    "max_model_len": 1024,
                    "max_num_seqs": 1,
                    "max_num_batched_tokens": 16,
                }
            )
            facts = read_model_facts(user_config.model, Env.read())
        resolved = resolve(user_config, facts, device="cpu", num_cores=2)
        model = load_model(resolved, lambda fraction: None, library=load())
        forward = build_programs(model, resolved, num_blocks=NUM_BLOCKS, max_model_len=1024, num_states=1, min_logits=1)
        steps = [CASE.inputs(model, resolved.block_size, seed) for seed in range(STEPS)]
        return cls(forward, steps, resolved.num_threads)

    @property
    def parameters(self) -> int:
        """Number of weights that one token is multiplied with."""
        return sum(program.work for program in self.forward.programs)

    def round_s(self) -> float:
        """Return the time of the fastest step of a round."""
        return min(map(self._step_s, self.steps))

    def _step_s(self, inputs: StepInputs) -> float:
        clock = time.process_time if self.num_threads == 1 else time.perf_counter
        start_s = clock()
        self.forward.run(inputs)
        self.forward.logits(inputs.query_starts[1:] - 1)
        return clock() - start_s

    def operations_ms(self) -> dict[str, float]:
        """Return the shortest time of each operation of the layers in a round, in descending order."""
        names = self.forward.layers.operations
        runs = [self.forward.layers.measure(step_arguments(inputs), self.num_threads) for inputs in self.steps]
        totals: dict[str, float] = {}
        for name, *values in zip(names, *runs, strict=True):
            totals[name] = totals.get(name, 0.0) + min(values) / 1e6
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _compare(name: str, candidate: _Candidate, baseline: _Candidate, args: argparse.Namespace) -> dict[str, Any]:
    size = candidate.parameters / baseline.parameters
    times, ratios = [], []
    for number in range(args.rounds + 1):
        baseline_s, time_s = baseline.round_s(), candidate.round_s()
        if number:  # the first is a warm-up
            times.append(time_s)
            ratios.append(time_s / baseline_s / size)
    time_s, ratio = statistics.median(times), statistics.median(ratios)
    nanoseconds = time_s * 1e9 / candidate.parameters
    print(
        f"{name:16} {candidate.parameters / 1e6:5.0f} M, {time_s * 1e3:6.2f} ms, {nanoseconds:.4f} ns per parameter, "
        f"{ratio:.2f} of Llama ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )
    operations = candidate.operations_ms() if args.operations else {}
    for operation, value in operations.items():
        if value > time_s * 1e3 / 200:
            print(f"  {operation:20} {value:7.3f} ms {'#' * round(value / time_s / 1e3 * BAR_WIDTH)}", flush=True)
    return {
        "family": name,
        "parameters": candidate.parameters,
        "ms": time_s * 1e3,
        "ratio": ratio,
        "ratios": ratios,
        "operations_ms": operations,
    }


if __name__ == "__main__":
    main()
