"""`WeightsState`: the workers' weights, and whether they are paused or asleep; stored for the next core."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from octavo.core_proc.weights.journal import WeightsJournal
from octavo.protocol.errors import ConfigError
from octavo.protocol.events import FactsChanged
from octavo.protocol.identity import DIGEST_BYTES
from octavo.protocol.weights import UpdateWeights, WeightSource, WeightsRecord, WeightsStatus


class WeightsState:
    """The record of the weights, and the journal that stores it.

    Args:
        record: the record of the previous core, or a new one.
        journal: the journal of this core.
        identity_of: returns the identity of the engine for a digest and a version of weights.
        weights_dir: directory into which clients upload weights. Weights that are no longer used are removed. "" if
            there is none.
        read_start_digest: returns the present digest of the weights that workers load when they start.
    """

    def __init__(
        self,
        record: WeightsRecord,
        journal: WeightsJournal,
        identity_of: Callable[[str, int], str],
        weights_dir: str = "",
        read_start_digest: Callable[[], str] = lambda: "",
    ) -> None:
        self.record = record
        self._journal = journal
        self._identity_of = identity_of
        self._weights_dir = Path(weights_dir) if weights_dir else None
        self._read_start_digest = read_start_digest

    @property
    def status(self) -> WeightsStatus:
        """The current state."""
        record = self.record
        return WeightsStatus(
            record.version,
            record.label,
            record.pause is not None,
            record.sleep_level if record.asleep else 0,
            record.asleep,
            record.fault,
        )

    @property
    def refusal(self) -> str:
        """Why new requests are rejected. Empty if they are accepted."""
        return "" if self.record.is_dropped else self.record.fault

    def fault_of_start(self) -> str:
        """Return why the weights that new workers have loaded cannot be served. Empty if they can."""
        record = self.record
        if record.is_lost or record.is_dropped or (record.sources and not record.sources[0].is_partial):
            return ""  # they are replaced in any case
        try:
            digest = self._read_start_digest()
        except (OSError, ConfigError) as error:
            return f"the model's weights cannot be read any more, so restarted workers may have other ones: {error}"
        if digest == record.start_digest:
            return ""
        return (
            "the files of the model's weights have changed since the engine was started, and restarted workers have "
            "read them: start the engine again, or update all weights"
        )

    def save(self, **changes: object) -> None:
        """Change the record, and store it for the next core."""
        self.record = replace(self.record, **changes)
        self._journal.save(self.record)

    def update(self, call: UpdateWeights, digest: str) -> None:
        """Note that all workers have new weights.

        Args:
            call: the call that has updated them.
            digest: digest of the files that were read.
        """
        record, source = self.record, WeightSource(call.path, call.is_partial, digest)
        if call.transfer is not None:  # no file identifies them; engines in one transfer get equal weights
            digest = hashlib.blake2b(call.transfer.transfer_id.encode(), digest_size=DIGEST_BYTES).hexdigest()
        if call.is_partial:
            both = f"{record.digest} {digest}".encode()
            digest = hashlib.blake2b(both, digest_size=DIGEST_BYTES).hexdigest()
        sources = [*record.sources, source] if call.is_partial else [source]
        is_lost = not call.is_kept or call.transfer is not None or (call.is_partial and record.is_lost)
        self.save(
            version=record.version + 1,
            label=call.label,
            digest=digest,
            sources=[] if is_lost else sources,
            is_lost=is_lost,
            update_id=call.update_id,
            fault="",
            is_dropped=False,
        )
        self._remove_unused(record.sources)

    @property
    def facts(self) -> FactsChanged:
        """What frontends must know about the weights."""
        record = self.record
        identity = self._identity_of(record.digest, record.version)
        return FactsChanged(identity, record.digest, record.version, record.label)

    def _remove_unused(self, sources: list[WeightSource]) -> None:
        """Remove uploaded weights that no worker will read again."""
        used = {source.path for source in self.record.sources}
        for source in sources:
            path = Path(source.path)
            if self._weights_dir is not None and path.parent == self._weights_dir and source.path not in used:
                shutil.rmtree(path, ignore_errors=True)
