"""Recurrences that are measured and estimated: the sizes of a layer, as in a published `config.json`."""

from dataclasses import dataclass
from typing import Literal

RecurrenceName = Literal["Mamba-2-2.7B", "Qwen3-Next-80B-A3B"]


@dataclass(frozen=True)
class Recurrence:
    """The states of a layer, and its convolution."""

    num_heads: int
    num_rows: int
    """Rows of the state of a head: sums run down them."""
    num_columns: int
    channels: int
    """Channels of the convolution."""
    is_delta_rule: bool
    conv_width: int = 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a request."""
        return 4 * self.num_heads * self.num_rows * self.num_columns

    @property
    def conv_state_bytes(self) -> int:
        """Bytes of the convolution's state of a request."""
        return 4 * (self.conv_width - 1) * self.channels


RECURRENCES: dict[RecurrenceName, Recurrence] = {
    "Mamba-2-2.7B": Recurrence(80, 128, 64, 5376, is_delta_rule=False),
    "Qwen3-Next-80B-A3B": Recurrence(32, 128, 128, 8192, is_delta_rule=True),
}
TINY: dict[bool, Recurrence] = {
    False: Recurrence(2, 16, 8, 48, is_delta_rule=False),
    True: Recurrence(2, 8, 16, 64, is_delta_rule=True),
}
"""Recurrences for dry runs, by whether the recurrence is a delta rule."""
