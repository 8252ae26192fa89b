"""Writes GGUF files from Hugging Face tensors as llama.cpp's converter does, for tests of the reader."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from gguf_k_quants import quantize_k

K_QUANTS = frozenset({GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K})

LLAMA_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS_LAYER = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
EXPERTS = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_PARTS = {"gate": "gate", "up": "up", "down": "down", "w1": "gate", "w3": "up", "w2": "down"}
LLAMA_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2_TOP = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    *,
    num_heads: int,
    num_kv_heads: int,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    other_kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write the tensors of a Hugging Face checkpoint.

    Matrices are quantized to `kind`, those whose name in the file holds a key of `other_kinds` to its value.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    if queries := [values for name, values in tensors.items() if name.endswith("q_proj.weight")]:
        writer.add_key_length(len(queries[0]) // num_heads)
    writer.add_token_list([f"token {i}" for i in range(50)])
    writer.add_array("test.nested", [[1, 2], [3]])
    for name, values in stack_experts(tensors).items():
        new_name = name if name.startswith("blk.") else gguf_name(architecture, name)
        if "ffn_gate_inp_shexp" in new_name:
            values = values[0]
        if architecture == "llama" and new_name.split(".")[-2] in ("attn_q", "attn_k"):
            values = _interleave(values, num_heads if ".attn_q." in new_name else num_kv_heads)
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        values = np.ascontiguousarray(values, dtype=np.float32)
        chosen = next((other for part, other in (other_kinds or {}).items() if part in new_name), kind)
        if values.ndim == 1 or chosen is GGMLQuantizationType.F32:
            writer.add_tensor(new_name, values)
        else:
            blocks = quantize_k(values, chosen) if chosen in K_QUANTS else quantize(values, chosen)
            writer.add_tensor(new_name, blocks, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stack_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the matrices of all experts of a layer by one tensor, under its name in the file."""
    others, stacks = {}, {}
    for name, values in tensors.items():
        if match := EXPERTS.fullmatch(name):
            layer, expert, part = match.groups()
            kind = EXPERT_PARTS[part.removesuffix("_proj")]
            stacks.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", {})[int(expert)] = values
        else:
            others[name] = values
    return others | {name: np.stack([part[expert] for expert in sorted(part)]) for name, part in stacks.items()}


def gguf_name(architecture: str, name: str) -> str:
    """Return GGUF's name of a Hugging Face tensor."""
    top, layer = (GPT2_TOP, GPT2_LAYER) if architecture == "gpt2" else (LLAMA_TOP, LLAMA_LAYER)
    module, _, suffix = name.rpartition(".")
    if module in top:
        return f"{top[module]}.{suffix}"
    _, _, number, inner = module.split(".", 3)
    return f"blk.{number}.{(layer | EXPERTS_LAYER)[inner]}.{suffix}"


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave rows: row i and row i + half of a head become its rows 2i and 2i + 1."""
    heads = np.split(values, num_heads)
    half = len(heads[0]) // 2
    order = [index for i in range(half) for index in (i, i + half)]
    return np.concatenate([head[order] for head in heads])
