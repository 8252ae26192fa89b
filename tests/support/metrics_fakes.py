"""An exporter of metrics for a made-up model, and the record of a finished request."""

from fake_client import resolved_config

from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.stats import RequestTimings

RECORD = RequestRecord(
    num_prompt_tokens=20,
    num_generation_tokens=11,
    max_generation_tokens=11,
    num_cached_tokens=16,
    num_preemptions=1,
    finish_reason="stop",
    params_n=1,
    params_max_tokens=64,
    e2e_s=3.5,
    timings=RequestTimings(queued=10.0, scheduled=10.5, first_token=11.5, finished=13.5),
)


def exporter(num_engines: int = 1, config: ResolvedConfig | None = None, **options) -> Metrics:
    blocks = dict.fromkeys(range(num_engines), 64)
    return Metrics(config or resolved_config(), max_model_len=256, engine_blocks=lambda: blocks, **options)
