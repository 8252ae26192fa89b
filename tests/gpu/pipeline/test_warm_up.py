"""What steps would otherwise wait for is done before the first one."""

import msgspec
import pytest
from fake_stream import FakeStream
from gpu_steps import SPECS, driver, prompt
from kernel_variants import recorded_variants
from triton_interpreter import IS_INTERPRETING
from worker_plans import spec

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.models.base import Model

pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN"),
    pytest.mark.xdist_group("pipeline"),
    pytest.mark.skipif(not IS_INTERPRETING, reason="looks into launches that are interpreted"),
]


def test_requests_compile_nothing(model: Model, config: ResolvedConfig, stream: FakeStream) -> None:
    """Without graphs every kernel is launched by itself, with any number of rows."""
    core = driver(
        model, msgspec.structs.replace(config, max_graph_size=0, max_num_batched_tokens=12), stream, has_graphs=False
    )
    with recorded_variants() as warmed_up:
        assert core.executor.warm_up() == 0
    with recorded_variants() as launched:
        core.admit(0, prompt(1), SPECS["processed"])
        core.begin()
        core.admit(1, prompt(4), SPECS["biased"])
        core.begin({0: 1, 1: 3})
        core.admit(2, prompt(8), SPECS["bad words"])
        core.admit(3, prompt(1), SPECS["penalized"])
        core.run(1)
        core.release(1)
        core.release(0)
        long_list = tuple((token_id, -50.0) for token_id in range(70))
        core.admit(1, prompt(1), spec(logit_bias=long_list, logprobs=40))
        core.admit(0, prompt(2), SPECS["named"])
        core.run(1)
    core.executor.close()
    assert launched
    assert launched - warmed_up == set()
