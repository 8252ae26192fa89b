"""`CallServices`: tenants, traces and the access log of one HTTP process, according to its configuration."""

from dataclasses import dataclass
from pathlib import Path

from octavo.frontend.calls.access_log import AccessLog
from octavo.frontend.calls.tracer import RequestTracer, traces_endpoint
from octavo.frontend.metrics.buckets import read_buckets
from octavo.frontend.tenants.file import TenantsFile, read_tenants
from octavo.frontend.tenants.usage import TenantUsage
from octavo.protocol.config import ResolvedConfig, ServerConfig
from octavo.protocol.errors import ConfigError

USAGE_FILE = "tenants"
"""Name of the usage file, in the directory that a server's HTTP processes share."""


@dataclass(frozen=True)
class Tenants:
    """The tenants, and their usage."""

    file: TenantsFile
    usage: TenantUsage


@dataclass(frozen=True)
class CallServices:
    """The services that record HTTP requests; a service is `None` if it is disabled."""

    tenants: Tenants | None = None
    tracer: RequestTracer | None = None
    access_log: AccessLog | None = None

    @property
    def is_any_enabled(self) -> bool:
        """Whether any service is enabled."""
        return self != CallServices()

    @classmethod
    def open(
        cls, config: ServerConfig, engine: ResolvedConfig, usage_path: Path | None = None, row: int = 0
    ) -> "CallServices":
        """Open the services.

        Args:
            config: the configuration of the server.
            engine: the configuration of the first engine.
            usage_path: path of the file in which all HTTP processes count the tenants' usage; None: this is the only
            process.
            row: the row of this process in that file.

        Raises:
            ConfigError: the tenants file is invalid, OpenTelemetry is missing, or the log cannot be written.
        """
        tenants = None
        if config.tenants is not None:
            file = TenantsFile(Path(config.tenants), has_priorities=engine.scheduling_policy == "priority")
            tenants = Tenants(file, TenantUsage(usage_path, row))
        endpoint = traces_endpoint(config.otlp_traces_endpoint)
        tracer = None if endpoint is None else RequestTracer(endpoint, engine.served_model_names[0])
        access_log = None
        if config.access_log_file is not None:
            silent = [path for text in config.disable_access_log_for_endpoints or () for path in text.split(",")]
            access_log = AccessLog(config.access_log_file, frozenset(map(str.strip, silent)))
        return cls(tenants, tracer, access_log)

    def close(self) -> None:
        """Flush all data. Blocks until the traces are sent or the exporter's timeout is over."""
        if self.tracer is not None:
            self.tracer.close()
        if self.access_log is not None:
            self.access_log.close()
        if self.tenants is not None:
            self.tenants.usage.close()


def check_services(config: ServerConfig, engine: ResolvedConfig | None = None) -> None:
    """Report invalid settings now instead of after the engine has loaded.

    Args:
        config: the configuration of the server.
        engine: the configuration of the first engine; None: it is not known yet.

    Raises:
        ConfigError: as in `CallServices.open`.
    """
    read_buckets(config.custom_histogram_buckets)
    if config.tenants is not None:
        has_priorities = engine is None or engine.scheduling_policy == "priority"
        read_tenants(Path(config.tenants), has_priorities=has_priorities)
    if (endpoint := traces_endpoint(config.otlp_traces_endpoint)) is not None:
        RequestTracer(endpoint, "").close()
    if config.access_log_file is not None:
        AccessLog(config.access_log_file).close()


def require_no_services(config: ServerConfig) -> None:
    """Reject settings that need middleware, because a router has none.

    Raises:
        ConfigError: such a setting is used; the message names the flag.
    """
    for name in ("tenants", "otlp_traces_endpoint", "access_log_file"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} belongs to the whole application, and create_router makes only its routes",
                hint="use create_app, and mount it",
            )
