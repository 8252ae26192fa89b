"""Runs every causal model of `transformers` without a family here, with tiny random weights, against `transformers`.

Each model runs in its own process. The results become a table in docs/models.md.
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.kernels.native import library
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.registry import ARCHITECTURES, build_model
from octavo.worker_proc.parallel.placement import Placement

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from model_runner import Runner, facts_of, filled, prompts  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tiny_fallback import FALLBACKS  # noqa: E402
from tiny_models import make_tiny  # noqa: E402

_VALUES = {
    320: "vocab_size vocab_size_per_layer_input",
    48: "hidden_size d_model n_embd dim embedding_size",
    96: "intermediate_size ffn_dim dff d_ff n_inner ffn_hidden_size",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    3: "num_hidden_layers n_layer num_layers n_layers",
    6: "num_attention_heads n_head n_heads num_heads attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts",
    1024: "max_position_embeddings n_positions n_ctx",
    2: "num_experts_per_tok moe_k eos_token_id moe_topk",
    24: "q_lora_rank",
    16: "kv_lora_rank",
    8: "qk_nope_head_dim qk_rope_head_dim v_head_dim head_dim hidden_size_per_layer_input",
    4: "rotary_dim",
    1: "n_group topk_group bos_token_id n_shared_experts",
    40: "sliding_window",
    0: "pad_token_id num_kv_shared_layers",
}
SIZES: dict[str, Any] = {
    "is_decoder": True,
    **{name: value for value, names in _VALUES.items() for name in names.split()},
}
"""Sizes of tiny models, by the names that configurations use for them."""
_OWN = {
    # Its code sets the embedding of padding to zero after loading, which here is the logit of a real token.
    "YoutuForCausalLM": {"pad_token_id": None},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Settings that only one model type needs."""
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
SECONDS = 60
"""Time limit for one model in seconds."""
MARKS = re.compile(r"(<!-- sweep -->\n).*(\n<!-- end of sweep -->)", re.DOTALL)


def main() -> None:
    """Run all architectures, or those named on the command line, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "architectures",
        nargs="*",
        help="class names; default: all without a family, whose results are written to docs/models.md",
    )
    given = parser.parse_args().architectures
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(ARCHITECTURES))
    results = {}
    for name in given or names:
        results[name] = _in_a_process(name)
        print(f"{name}: {results[name]}", flush=True)
    if not given:
        page = ROOT / "docs" / "models.md"
        text = page.read_text("utf-8")
        page.write_text(MARKS.sub(lambda match: match[1] + table(results) + match[2], text), "utf-8")


def _in_a_process(name: str) -> str:
    """Return the result for an architecture, even if its process dies or does not end."""
    context = multiprocessing.get_context("fork")  # the imports above take seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(result_of(name)))
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(SECONDS) else "no tiny model: it takes too long"
    except EOFError:
        return "no tiny model: its process ended"
    finally:
        process.kill()
        process.join()


def result_of(name: str) -> str:
    """Return "runs", or the reason why it does not."""
    model_class = getattr(transformers, name)
    if model_class._is_stateful:
        return "refused: layers with a recurrent state"
    try:
        defaults = model_class.config_class().to_dict()
    except Exception as error:
        return f"no tiny model: {_short(error)}"
    if "vision_config" in defaults or "audio_config" in defaults or "audio_encoder" in defaults:
        return "not a model of text alone"
    if defaults.get("is_encoder_decoder"):
        return "refused: the decoder of an encoder and a decoder"
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = _tiny(name, model_class.config_class, defaults, Path(folder) / "model")
        except Exception as error:
            return f"no tiny model: {_short(error)}"
        try:
            return _compare(path, name)
        except ConfigError as error:
            return f"refused: {_short(error)}"
        except Exception as error:
            return f"fails: {_short(error)}"


def _tiny(name: str, config_class: Any, defaults: dict[str, Any], path: Path) -> Path:
    """Make a tiny model: the tests' one if it exists, otherwise with sizes that most configurations accept."""
    for architecture, class_name, settings in FALLBACKS.values():
        if architecture == name:
            return make_tiny(name, path, class_name=class_name, **settings)
    settings = {key: size for key, size in SIZES.items() if key in defaults}
    has_latent_keys = "kv_lora_rank" in defaults
    settings |= {key: 6 if has_latent_keys else 2 for key in ("num_key_value_heads", "num_kv_heads") if key in defaults}
    for key in _BY_LAYER:
        if isinstance(defaults.get(key), list):
            settings[key] = (list(dict.fromkeys(defaults[key])) * 3)[:3]
    settings |= _OWN.get(name, {})
    return make_tiny(name, path, class_name=config_class.__name__, **settings)


@torch.inference_mode()
def _compare(path: Path, name: str) -> str:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    facts = replace(facts_of(path), model_impl="transformers")
    model = filled(build_model(facts, Placement(torch.float32)), path, library.load())
    theirs = getattr(transformers, name).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    runner = Runner(model, torch.float32, 512)
    tokens = prompts(320)
    difference, is_invariant = 0.0, True
    for request, prompt in enumerate(tokens):
        expected = theirs(input_ids=prompt[None]).logits[0].log_softmax(1)
        actual = runner.in_chunks(tokens, request, [len(prompt)])
        parts = runner.in_chunks(tokens, request, [7, 16, len(prompt)])
        is_invariant = is_invariant and torch.equal(actual, parts)
        difference = max(difference, float((actual.log_softmax(1) - expected).abs().max()))
    if not difference <= 1e-4:
        return f"differs: by {difference:.1e}"
    return "runs" if is_invariant else "runs, with bits that depend on chunks"


def _short(error: Exception) -> str:
    """Return the first line of an error, without the parts that differ between models."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = re.sub(r"^\w+ cannot run through transformers: ", "", text).partition(": (heads, keys, values)")[0]
    text = re.sub(r"\b(\w+\.)+\d+\.([\w.]+)", r"\2", text).replace("|", "/")
    return text if len(text) <= 110 else f"{text[:107]}..."


def table(results: dict[str, str]) -> str:
    """Return the table of results; results that most models share are first."""
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        groups.setdefault(result, []).append(f"`{name}`")
    rows = [
        f"With transformers {transformers.__version__}, {len(results)} architectures without a family:",
        "",
        "| result | architectures |",
        "| --- | --- |",
    ]
    order = sorted(groups, key=lambda result: (not result.startswith("runs"), -len(groups[result]), result))
    return "\n".join([*rows, *(f"| {result} | {', '.join(groups[result])} |" for result in order)])


if __name__ == "__main__":
    main()
