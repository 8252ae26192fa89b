"""Tiny heads in the published layouts of EAGLE and EAGLE-3, for the tiny Llama, and their formulas in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import MAX_POSITIONS, VOCAB_SIZE, make_tiny
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import AutoModelForCausalLM

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 6, 2, 16
EPS, THETA = 1e-5, 10000.0
NUM_DRAFT_TOKENS = 200
"""Size of the vocabulary of the EAGLE-3 head."""
AUX_LAYERS = [1, 2, 3]
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def make_head(method: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a head with random weights into `directory`, which is made, and return it."""
    directory.mkdir(parents=True)
    is_third = method == "eagle3"
    layer, factor = ("midlayer", 2) if is_third else ("layers.0", 1)
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, factor * WIDTH),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, factor * WIDTH),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, factor * WIDTH),
        f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{layer}.post_attention_layernorm.weight": (WIDTH,),
        "fc.weight": (WIDTH, (len(AUX_LAYERS) if is_third else 2) * WIDTH),
    }
    config = {**_CONFIG, "architectures": ["LlamaForCausalLM"]}
    if is_third:
        names = [f"{layer}.hidden_norm", f"{layer}.input_layernorm", "norm"]
        shapes |= {f"{name}.weight": (WIDTH,) for name in names} | {"lm_head.weight": (NUM_DRAFT_TOKENS, WIDTH)}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": NUM_DRAFT_TOKENS,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(*shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    if is_third:
        token_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_DRAFT_TOKENS].sort().values
        weights["d2t"] = token_ids - torch.arange(NUM_DRAFT_TOKENS)
        weights["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, token_ids, value=True)
    else:
        # a copy of the model's table, which is read instead
        weights["embed_tokens.weight"] = torch.zeros(VOCAB_SIZE, WIDTH)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, **overrides}))
    return directory


def depend_on_the_last_token(directory: Path) -> None:
    """Change a tiny Llama, or an EAGLE head of it, so that its next token depends on the last one only.

    Such a head is right if it computes with the embeddings and the output of its model.
    """
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "fc.weight":
            tensor.copy_(torch.eye(*tensor.shape))
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def head_rows(weights: dict[str, Tensor], embedded_TD: Tensor, features_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the output weight, and the features that replace the model's, for one request.

    Args:
        weights: weights of a head; EAGLE-3's `fc` has been applied.
        embedded_TD: embedding of the token after each position.
        features_TD: features of each position.
    """
    if is_third := "midlayer.hidden_norm.weight" in weights:
        layer, residual_TD = "midlayer", features_TD
        parts = [
            _norm(weights, f"{layer}.input_layernorm", embedded_TD),
            _norm(weights, f"{layer}.hidden_norm", features_TD),
        ]
        x_TD = torch.cat(parts, dim=1)
    else:
        layer = "layers.0"
        x_TD = residual_TD = torch.cat([embedded_TD, features_TD], dim=1) @ weights["fc.weight"].T
    q, k, v = (
        (x_TD @ weights[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        for part in "qkv"
    )
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
    scores = _rotated(q) @ _rotated(k).transpose(1, 2) * HEAD_DIM**-0.5
    is_later = torch.ones(scores.shape[1:]).triu(1).bool()
    out = (scores.masked_fill(is_later, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
    residual_TD = residual_TD + out @ weights[f"{layer}.self_attn.o_proj.weight"].T
    x_TD = _norm(weights, f"{layer}.post_attention_layernorm", residual_TD)
    gate, up = (x_TD @ weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    residual_TD = residual_TD + (silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return (_norm(weights, "norm", residual_TD) if is_third else residual_TD), residual_TD


def _norm(weights: dict[str, Tensor], name: str, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, (WIDTH,), weights[f"{name}.weight"], EPS)


def _rotated(x_NTH: Tensor) -> Tensor:
    frequencies_C = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles_TC = torch.arange(x_NTH.shape[1])[:, None] * frequencies_C
    cos, sin = angles_TC.cos(), angles_TC.sin()
    first, second = x_NTH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def make_mtp(arch: str, directory: Path, num_layers: int, seed: int = 0) -> tuple[Path, "MtpLayer"]:
    """Write a tiny model with a layer for multi-token prediction behind the last one; returns both."""
    longer = make_tiny(arch, directory / "longer", seed=seed + 1, num_hidden_layers=num_layers + 1)
    model = make_tiny(arch, directory / "model", seed=seed, num_hidden_layers=num_layers, num_nextn_predict_layers=1)
    name, generator = f"model.layers.{num_layers}", torch.Generator().manual_seed(seed + 2)
    last = load_file(longer / "model.safetensors")
    own = {f"{name}.{part}.weight": torch.rand(WIDTH, generator=generator) + 0.5 for part in MtpLayer.NORMS}
    own[f"{name}.eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=generator) * 0.2
    own |= {f"{name}.{part}.weight": torch.zeros(VOCAB_SIZE, WIDTH) for part in ("embed_tokens", "shared_head.head")}
    own |= {key: value for key, value in last.items() if key.startswith(f"{name}.")}
    weights = load_file(model / "model.safetensors") | own
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model, MtpLayer(AutoModelForCausalLM.from_pretrained(longer, dtype=torch.float32), own, name)


class MtpLayer:
    """The formula of multi-token prediction, around a decoder layer of transformers."""

    NORMS = ("enorm", "hnorm", "shared_head.norm")

    def __init__(self, longer: Any, weights: dict[str, Tensor], name: str) -> None:
        self._model, self._weights, self._name = longer.model, weights, name
        self._eps = longer.config.rms_norm_eps

    def rows(self, embedded_TD: Tensor, features_TD: Tensor) -> tuple[Tensor, Tensor]:
        """See `head_rows`."""
        parts = [self._norm("enorm", embedded_TD), self._norm("hnorm", features_TD)]
        x_1TD = (torch.cat(parts, dim=1) @ self._weights[f"{self._name}.eh_proj.weight"].T)[None]
        positions_1T = torch.arange(x_1TD.shape[1])[None]
        angles = self._model.rotary_emb(x_1TD, positions_1T)
        out = self._model.layers[-1](x_1TD, attention_mask=None, position_ids=positions_1T, position_embeddings=angles)
        residual_TD = (out if isinstance(out, Tensor) else out[0])[0]
        return self._norm("shared_head.norm", residual_TD), residual_TD

    def _norm(self, part: str, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, (WIDTH,), self._weights[f"{self._name}.{part}.weight"], self._eps)
