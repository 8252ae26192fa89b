"""Which weights a pipeline stage holds."""

import pytest
import torch
from tiny_models import make_tiny
from worker_plans import worker_config

from octavo.kernels.linear import Packer
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.stages import ALL_LAYERS, Stage
from octavo.worker_proc.weights.reader import read_weights

FIRST = Stage(range(2), is_first=True, is_last=False)
MIDDLE = Stage(range(2, 3), is_first=False, is_last=False)
LAST = Stage(range(3, 5), is_first=False, is_last=True)


@pytest.mark.parametrize(
    ("layer", "is_output", "holders"),
    [
        ("layers.1.mlp.up_proj", True, [FIRST]),
        ("h.2.ln_1", False, [MIDDLE]),
        ("layers.4.self_attn.qkv_proj", True, [LAST]),
        ("embed_tokens", False, [FIRST]),
        ("lm_head", True, [LAST]),
        ("norm", False, [FIRST, LAST]),
    ],
)
def test_a_weight_is_where_it_is_used(layer: str, is_output: bool, holders: list[Stage]) -> None:
    assert [stage for stage in (FIRST, MIDDLE, LAST) if stage.holds(layer, is_output=is_output)] == holders
    assert ALL_LAYERS.holds(layer, is_output=is_output)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_stage_reads_and_keeps_its_own_weights_only(tmp_path, is_tied: bool) -> None:
    path = make_tiny("LlamaForCausalLM", tmp_path, num_hidden_layers=3, tie_word_embeddings=is_tied)
    facts = worker_config(path).model
    read: list[list[str]] = []
    for stage in (Stage(range(1), True, False), Stage(range(1, 2), False, False), Stage(range(2, 3), False, True)):
        model = build_model(facts, Placement(torch.float32, stage=stage))
        names = [name for name, _ in read_weights(facts, lambda _: None, model.parameters.wants)]
        model.load_weights(read_weights(facts, lambda _: None, model.parameters.wants))
        model.pack(Packer(torch.device("cpu")))
        assert model.cache_groups[0].layers == tuple(stage.layers)
        read.append(sorted(name.removeprefix("model.") for name in names))
    layers = [[name for name in names if name.startswith("layers.")] for names in read]
    assert [{name.split(".")[1] for name in names} for names in layers] == [{"0"}, {"1"}, {"2"}]
    others = [[name for name in names if not name.startswith("layers.")] for names in read]
    output = "embed_tokens.weight" if is_tied else "lm_head.weight"
    assert others == [["embed_tokens.weight", "norm.weight"], [], sorted(["norm.weight", output])]
