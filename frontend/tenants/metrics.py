"""The metrics of tenants: usage by name, never by key."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from octavo.frontend.metrics.exporter import PREFIX
from octavo.frontend.metrics.names import TENANT_METRICS
from octavo.frontend.tenants.usage import Totals


def render_usage(totals: Mapping[str, Totals]) -> bytes:
    """Return the usage of tenants in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Usage(totals))
    return generate_latest(registry)


class _Usage(Collector):
    def __init__(self, totals: Mapping[str, Totals]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `TENANT_METRICS`."""
        for metric in TENANT_METRICS:
            family = Metric(PREFIX + metric.name, metric.help, metric.kind.value)
            suffix = "_total" if metric.kind.value == "counter" else ""
            for name, one in self._totals.items():
                for labels, value in _series(metric.name, one):
                    family.add_sample(family.name + suffix, {"tenant": name, **labels}, value)
            yield family


def _series(name: str, totals: Totals) -> list[tuple[dict[str, str], float]]:
    if name == "tenant_rejections":
        return [({"reason": reason}, count) for reason, count in totals.num_rejected.items()]
    fields = {
        "tenant_requests": totals.num_requests,
        "tenant_prompt_tokens": totals.num_prompt_tokens,
        "tenant_generation_tokens": totals.num_generation_tokens,
        "tenant_requests_running": totals.num_live,
    }
    return [({}, fields[name])]
