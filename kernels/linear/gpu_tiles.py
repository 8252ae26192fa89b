"""How our product is divided on a GPU: splits of the inputs, tiles, programs, pipeline stages. Computes no product.

The splits decide the order of sums, so they are a function of only the weight's shape and the GPU. Under
`--enable-tp-invariant-inference` the shape is that of the complete weight, not of a rank's part. Everything else may
also depend on the number of rows, because it changes no bits.
"""

from dataclasses import dataclass

INPUTS_BLOCK = {2: 64, 4: 32}
"""Inputs that a program loads at once, by element size in bytes: 128 bytes, the width of a shared memory swizzle
line."""
DECODE_ROWS = 64
"""Up to this many rows form one tile, the smallest of Hopper's `wgmma`. Its unused rows are free, because reading the
weight takes the time."""
_MAX_SPLITS = 8
_LEAST_INPUTS = 16
"""Inputs of one tensor core instruction; a segment has a multiple of them."""
_LEAST_BLOCKS = 4
"""Minimum blocks of inputs in a split: fewer would not fill the pipeline."""
_BUSY_SHARE = 0.45
"""Share of the multiprocessors that saturates the memory bandwidth: each can read 100 GB/s."""
_EPILOGUE_BYTES = 33 << 10
"""Shared memory in addition to the stages: an output tile waiting to be stored, and the barriers."""
_MAX_STAGES = {(64, 128): 8, (64, 256): 4, (128, 128): 6, (128, 256): 4}
"""Maximum stages by rows and outputs of a tile: 100 KB or more are in flight, twice what covers the memory latency."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that decide how products are divided."""

    num_multiprocessors: int
    shared_bytes: int
    """Shared memory of one program in bytes."""
    has_descriptors: bool
    """Whether matrices are copied by the tensor memory accelerator (TMA)."""


H100 = Gpu(132, 227 << 10, has_descriptors=True)


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that a program computes at a time, and the launch options of the program."""

    rows: int
    outputs: int
    inputs: int
    """Inputs in one pipeline stage."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of a product with some number of rows."""

    tile: Tile
    num_tiles: int
    num_programs: int
    is_spread: bool
    """Whether the splits of a tile are computed by different programs, and added by the one that finishes last."""
    num_groups: int = 1
    """Groups of splits whose sums are stored, for another kernel to add."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How all products with weights of one shape are divided."""

    num_outputs: int
    num_inputs: int
    element_bytes: int
    gpu: Gpu
    num_segments: int = 0
    """Splits that are added as in a binary tree: the first half of them plus the second, and so on, as ranks add their
    sums. 0: splits are chosen for speed, and added in ascending order."""
    usual_outputs: int = 0
    """Number of outputs for which the splits are chosen; 0 for `num_outputs`. Equal on all ranks that divide a
    weight."""

    @property
    def num_splits(self) -> int:
        """Return the number of splits of the inputs. Each is summed from zero, and then the sums are added.

        Weights with few outputs are split until a decode has programs for about half of the multiprocessors, which
        saturate the memory bandwidth. More splits would cost more than they gain: their sums are written and read. A
        program that computes all splits needs registers for two sums, and so has smaller tiles.
        """
        if self.num_segments:
            return self.num_segments
        if self.element_bytes == 4:
            return 1
        num_blocks = -(-self.num_inputs // INPUTS_BLOCK[self.element_bytes])
        num_tiles = -(-(self.usual_outputs or self.num_outputs) // 128)
        splits = 1
        while (
            splits < _MAX_SPLITS
            and splits * num_tiles < _BUSY_SHARE * self.gpu.num_multiprocessors
            and num_blocks % (2 * splits) == 0
            and num_blocks // (2 * splits) >= _LEAST_BLOCKS
        ):
            splits *= 2
        return splits

    @property
    def split_inputs(self) -> int:
        """Return the inputs of a split. The last split may have fewer, but segments all have the same number."""
        if self.num_segments:
            return self.num_inputs // self.num_segments
        block = INPUTS_BLOCK[self.element_bytes]
        return -(-self.num_inputs // (block * self.num_splits)) * block

    def launch(self, num_rows: int, *, is_gated: bool = False) -> Launch:
        """Return the launch for a number of rows, at least one.

        `is_gated`: half of a tile's outputs come from each half of the weight.
        """
        tile = self._tile(num_rows)
        halves = 1 + is_gated
        num_tiles = -(-num_rows // tile.rows) * -(-(self.num_outputs // halves) // (tile.outputs // halves))
        is_spread = self.num_splits > 1 and 2 * num_tiles <= self.gpu.num_multiprocessors
        if is_spread:
            return Launch(tile, num_tiles, num_tiles * self.num_splits, is_spread)
        # A program adds up two segments; its registers hold no further sums.
        num_groups = max(1, self.num_segments // 2)
        return Launch(tile, num_tiles, min(num_tiles * num_groups, self.gpu.num_multiprocessors), is_spread, num_groups)

    def _tile(self, num_rows: int) -> Tile:
        inputs = self._block_inputs()
        if self.element_bytes == 4:
            return Tile(64, 64, inputs, num_warps=8, num_stages=3)
        rows = 64 if num_rows <= DECODE_ROWS else 128
        # Wide tiles read the rows less often, unless they leave multiprocessors idle. Their accumulators leave no
        # registers for pointers or for a second sum.
        num_wide = -(-num_rows // rows) * -(-self.num_outputs // 256)
        is_wide = (
            self.num_splits == 1
            and self.gpu.has_descriptors
            and self._num_stages(rows, 256) >= 3
            and 4 * num_wide >= 3 * self.gpu.num_multiprocessors
        )
        outputs = 256 if is_wide else 128
        return Tile(rows, outputs, inputs, num_warps=rows // 16, num_stages=self._num_stages(rows, outputs))

    def _block_inputs(self) -> int:
        """Return the inputs that are loaded at once: a divisor of a segment. Does not affect the order of sums."""
        block = INPUTS_BLOCK[self.element_bytes]
        while self.num_segments and self.split_inputs % block:
            block //= 2
        return block

    def _num_stages(self, rows: int, outputs: int) -> int:
        stage_bytes = (rows + outputs) * INPUTS_BLOCK[2] * self.element_bytes
        # The sums of segments are float32.
        epilogue_bytes = rows * outputs * 4 + 1024 if self.num_segments else _EPILOGUE_BYTES
        return min(_MAX_STAGES[rows, outputs], (self.gpu.shared_bytes - epilogue_bytes) // stage_bytes)


def most_segments(num_inputs: int, num_segments: int) -> int:
    """Return the most segments into which the inputs can be divided: `num_segments`, half of it, a quarter and so
    on."""
    while num_segments > 1 and num_inputs % (num_segments * _LEAST_INPUTS):
        num_segments //= 2
    return num_segments
