"""Checks for bits that do not depend on the number of workers that share the layers."""

from octavo.protocol.config.division import has_experts
from octavo.protocol.config.engine import DeviceName, EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

NUM_RANKS = (1, 2, 4, 8)
"""Sums are computed as a binary tree over at most 8 segments."""


def check_tp_invariance(config: EngineConfig, facts: ModelFacts, device: DeviceName) -> None:
    """Reject settings that cannot be combined with `--enable-tp-invariant-inference`.

    Raises:
        ConfigError: the configuration has such a setting.
    """
    parallel = config.parallel
    if not parallel.enable_tp_invariant_inference:
        return
    size = parallel.tensor_parallel_size
    obstacles = [
        (
            size not in NUM_RANKS,
            f"--tensor-parallel-size {size}: workers add up their sums in halves",
            "use --tensor-parallel-size 1, 2, 4 or 8",
        ),
        (
            device == "cpu" and config.device.cpu_kernels == "torch",
            "it needs the native kernels, which --cpu-kernels torch disables",
            "leave out --cpu-kernels torch",
        ),
        (
            device == "cuda" and not config.device.enable_deterministic_inference,
            "it needs batch-invariant products",
            "leave out --no-enable-deterministic-inference",
        ),
        (
            device == "cuda" and size > 1 and has_experts(facts) and not parallel.enable_expert_parallel,
            f"{facts.architecture} has experts, which GPUs add up whole only",
            "use --enable-expert-parallel, which gives each worker whole experts",
        ),
    ]
    for is_there, problem, hint in obstacles:
        if is_there:
            raise ConfigError(
                f"--enable-tp-invariant-inference: {problem}",
                hint=f"{hint}, or leave --enable-tp-invariant-inference out",
            )
