"""`PooledResult`: the result of one prompt, converted from the engine's form to the forms of the APIs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.protocol.events import PooledOutput
from octavo.protocol.ids import IdArray

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True, slots=True)
class PooledResult:
    """The result of one prompt."""

    request_id: str
    token_ids: IdArray
    """Token ids of the prompt."""
    pooled: PooledOutput
    num_cached_tokens: int = 0

    def array(self) -> "ndarray":
        """Return the result as float32, without a copy if it already is."""
        import numpy  # loaded by the first result, not at start-up

        data = memoryview(self.pooled.data.data)
        if self.pooled.dtype == "bfloat16":
            bits = numpy.frombuffer(data, dtype="<u2").astype("<u4") << 16
            return bits.view("<f4").reshape(self.pooled.shape)
        return numpy.frombuffer(data, dtype="<f4").reshape(self.pooled.shape)
