"""scripts/gpu_*estimates: docs/gpu-kernels.md has their tables, and the goals are within reach."""

import gpu_attention_estimates
import gpu_decode_estimates
import gpu_estimates
import gpu_expert_estimates
import gpu_quantized_estimates
import gpu_quantized_expert_estimates
import gpu_state_estimates
import pytest
from bench_gpu_parts.mixtures import MIXTURES, MixtureName
from bench_gpu_parts.quantized import QUANTIZED_MIXTURES, QuantizedName
from bench_gpu_parts.recurrences import RECURRENCES
from source_tree import ROOT


def test_the_documented_tables_are_the_current_ones() -> None:
    documented = (ROOT / "docs" / "gpu-kernels.md").read_text()
    assert gpu_estimates.table("H200") in documented
    assert gpu_estimates.epilogue_table("H200") in documented
    assert gpu_estimates.rank_table("H200") in documented
    assert gpu_attention_estimates.table("H200") in documented
    assert gpu_decode_estimates.table("H200") in documented
    assert gpu_state_estimates.table("H200") in documented
    assert all(gpu_expert_estimates.table(gpu) in documented for gpu in gpu_expert_estimates.GPUS)
    assert gpu_quantized_estimates.bounds_table("H200") in documented
    for device in gpu_estimates.DEVICES:
        assert gpu_quantized_estimates.table(device) in documented
        assert gpu_quantized_expert_estimates.table(device) in documented


@pytest.mark.parametrize("gpu", gpu_expert_estimates.GPUS)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_read_what_is_routed_to_and_no_estimate_beats_the_roofline(
    name: str, gpu: gpu_expert_estimates.GpuName
) -> None:
    mixture = MIXTURES[name]
    found = [gpu_expert_estimates.estimate_layer(mixture, rows, gpu) for rows in (1, 64, 8192)]
    assert [each.num_read for each in found][::2] == [mixture.top_k, mixture.num_experts]
    assert all(0.0 < each.share <= 1.0 for each in found)
    assert found[0].seconds < found[1].seconds < found[2].seconds


@pytest.mark.parametrize(("form", "name"), QUANTIZED_MIXTURES.items())
def test_quantized_experts_meet_the_goal_in_decodes_on_an_h100(form: QuantizedName, name: MixtureName) -> None:
    found = [
        gpu_quantized_expert_estimates.estimate_layer(form, MIXTURES[name], rows, "H100") for rows in (1, 16, 256, 8192)
    ]
    assert all(0.75 <= each.share <= 1.0 for each in found[1:3])
    assert found[0].seconds < found[1].seconds < found[2].seconds < found[3].seconds


@pytest.mark.parametrize("name", ["GPTQ", "Q4_K", "Q8_0", "w8a16"])
def test_quantized_products_meet_the_goal_in_decodes_with_early_launches(name: QuantizedName) -> None:
    _, with_early_launches, most = gpu_quantized_estimates.bounds(name, 16, "H200")
    assert 0.75 < with_early_launches <= most


@pytest.mark.parametrize("name", RECURRENCES)
def test_states_are_read_at_the_rate_of_memory_and_prompts_are_bound_by_instructions(name: str) -> None:
    decode, prompt = (
        gpu_state_estimates.estimate_recurrence(RECURRENCES[name], *step, "H200") for step in ((256, 1), (1, 2048))
    )
    assert decode.parts_s["memory"] > decode.parts_s["instructions"]
    assert prompt.parts_s["memory"] < prompt.parts_s["instructions"]
    assert 0.0 < prompt.share < decode.share < 1.0


def test_decodes_read_shared_keys_once() -> None:
    of = gpu_decode_estimates.estimate_decode
    apart, shared = of(64, 4352, 0, 32, 8, "H200"), of(64, 4352, 4096, 32, 8, "H200")
    assert apart.kv_bytes / shared.kv_bytes == 64 * 4352 / (64 * 256 + 4096)
    assert shared.seconds < apart.seconds / 7
    assert of(64, 1024, 0, 32, 8, "H200").fixed_s < 5e-6, "no partial sums"
    assert gpu_decode_estimates.bandwidth_share("Llama-3.1-8B", 64, 1024, "H200", is_library=False) > 0.85


def test_the_documented_gain_of_early_launches_is_the_current_one() -> None:
    documented = (ROOT / "docs" / "gpu-kernels.md").read_text().partition("## Early launches")[2].partition("##")[0]
    for model in gpu_estimates.MODELS:
        for is_early in (False, True):
            share = gpu_estimates.layers_share(model, 64, "H200", is_early=is_early)
            assert f"{100 * share:.0f} %" in documented


@pytest.mark.parametrize("device", gpu_estimates.DEVICES)
@pytest.mark.parametrize("num_rows", gpu_estimates.ROWS)
def test_the_epilogue_that_is_built_pays_for_large_models(device: gpu_estimates.DeviceName, num_rows: int) -> None:
    apart_s, fused_s = gpu_estimates.epilogue_seconds("Llama-3.1-8B", num_rows, device, "silu_and_mul")
    assert fused_s < apart_s


@pytest.mark.parametrize("device", gpu_estimates.DEVICES)
def test_goals_are_within_reach(device: gpu_estimates.DeviceName) -> None:
    """Decode of 64 at 85 % of the bandwidth, prefill at 70 % of the matrix rate."""
    assert gpu_estimates.layers_share("Llama-3.1-8B", 64, device) >= 0.85
    assert gpu_estimates.layers_share("Llama-3.1-8B", 8192, device) >= 0.70


@pytest.mark.parametrize("m", [1, 64, 65, 256, 8192])
def test_no_estimate_beats_the_roofline(m: int) -> None:
    for n, k in [(48, 36), (4096, 4096), (28672, 4096), (1024, 3072)]:
        estimate = gpu_estimates.estimate_product(m, n, k, "bfloat16", "H200")
        assert 0.0 < estimate.share <= 1.0
        assert estimate.seconds >= max(estimate.parts_s.values())
        assert estimate.limit in estimate.parts_s


@pytest.mark.parametrize("model", gpu_estimates.MODELS)
@pytest.mark.parametrize("device", gpu_estimates.DEVICES)
def test_attention_of_long_prompts_reaches_400_tflops(
    model: gpu_estimates.ShapeName, device: gpu_estimates.DeviceName
) -> None:
    for num_tokens in (8192, 32768):
        estimate = gpu_attention_estimates.attention_of(model, num_tokens, device)
        assert estimate.flops / estimate.seconds >= 400e12


@pytest.mark.parametrize("num_tokens", [1, 33, 512, 8192])
def test_no_estimate_of_attention_beats_the_roofline(num_tokens: int) -> None:
    estimate = gpu_attention_estimates.attention_of("Llama-3.1-8B", num_tokens, "H200")
    without = gpu_attention_estimates.attention_of("Llama-3.1-8B", num_tokens, "H200", is_overlapped=False)
    assert 0.0 < estimate.share < 1.0
    assert estimate.seconds < without.seconds
    assert estimate.limit == "multiprocessor"


def test_prefill_reaches_70_percent_of_the_matrix_rate() -> None:
    for is_library in (True, False):
        assert gpu_attention_estimates.prefill_share("Llama-3.1-8B", 8192, "H200", is_library=is_library) >= 0.70
