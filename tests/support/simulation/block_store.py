"""Where a simulated core keeps KV blocks: files, or a connector of the user's."""

from collections.abc import Callable
from typing import Any

from octavo.core_proc.block_transfers import LoadingWorkers
from octavo.core_proc.file_store import FileStore
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.transfer.plugin import PluginConnector
from simulation.connector import open_simulated
from simulation.files import SimulatedFiles, SimulatedWatch
from simulation.world import Process


def store_blocks(
    process: Process,
    scheduler: Scheduler,
    workers: LoadingWorkers,
    files: SimulatedFiles,
    scale: float,
    on_event: Callable[[], None],
) -> PluginConnector | None:
    """Keep blocks in files or through a connector, if the engine does; returns the connector.

    Args:
        process: the core.
        scheduler: scheduler of this core.
        workers: workers of this core.
        files: files of all ranks and engines.
        scale: typical duration of a step, in seconds.
        on_event: called when there is news of files or from the connector.
    """
    config, connector, saves, finds = scheduler.config, None, True, True
    if not config.stores_blocks:
        return None
    watch: Any
    if (setting := config.kv_connector) is None:
        watch = SimulatedWatch(files, process, scale, on_event)
    else:
        timeout_s = config.recovery.execute_model_timeout
        watch = connector = open_simulated(process, scheduler, setting, files, scale, timeout_s, on_event)
        saves, finds = setting.saves, setting.loads
    min_free = files.rng.choice([0, 5, 10_000])
    FileStore(scheduler, workers, "", watch, 1000, 1000, finds=finds, saves=saves, min_free_blocks=min_free)
    return connector
