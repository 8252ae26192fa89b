"""`PrecomputedMedia`: makes results from rows that callers have computed, so that no encoder runs.

The tokens around the rows are learned from the model's processor, which is given an empty item. The run of placeholders
in its output is then extended or shortened to the number of rows.
"""

import asyncio
from typing import Any

from octavo.frontend.generation.tensors import RowsForm, decode_tensor
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.kinds import token_id_of
from octavo.frontend.media.precomputed import GRID, KEYS, PrecomputedRows, whole_numbers
from octavo.frontend.media.processor import MediaProcessor
from octavo.frontend.media.wire import Result
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import NUM_AXES, PRECOMPUTED_ROWS, Kind, MediaTensor, digest_of

_MAX_GRID_CHARS = 2**15
"""Limit of base64 characters: a file that holds a tensor of a few numbers."""


class PrecomputedMedia:
    """Makes results from rows that callers have computed, in the form in which processes make them from files.

    Args:
        config: configuration of the engine.
        processor: provides the placeholder's text and the result of an empty item.
    """

    def __init__(self, config: ResolvedConfig, processor: MediaProcessor) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads media"
        self._media, self._facts, self._dtype = config.media, config.model.media, config.dtype
        self._width = config.media_row_width
        self._processor = processor

    async def result(self, kind: Kind, item: PrecomputedRows) -> Result:
        """Return the result of an item.

        Raises:
            MediaError: the engine accepts no embeddings, or the rows do not fit this model.
        """
        if not self._media.takes_embeds:
            raise MediaError("this engine takes no embeddings of media: start it with --enable-mm-embeds")
        probe, placeholder = await self._processor.empty(kind), await self._processor.placeholder(kind)
        try:
            tensor, num_rows, grid = await asyncio.to_thread(self._read, kind, item, needs_grid=bool(probe.grid))
        except InvalidRequestError as error:
            raise MediaError(error.message) from None
        row_id = token_id_of(self._facts, kind)
        replacement, token_ids = _around(probe, placeholder, row_id, num_rows, self._facts.architecture)
        tensors = {PRECOMPUTED_ROWS: tensor}
        return Result(
            replacement=replacement,
            token_ids=token_ids,
            num_rows=num_rows,
            digest=digest_of(tensors, grid),
            tensors={name: (one.dtype, one.shape, bytes(one.data.data)) for name, one in tensors.items()},
            grid=grid,
        )

    def _read(self, kind: Kind, item: PrecomputedRows, *, needs_grid: bool) -> tuple[MediaTensor, int, list[int]]:
        """Return the rows in the model's dtype, their number, and their grid."""
        most = self._media.max_item_tokens
        form = RowsForm(KEYS[kind], self._width, most, "--encoder-cache-tokens")
        rows = form.checked(form.decode(item.rows) if isinstance(item.rows, str) else item.rows)
        if len(rows) > most:
            raise InvalidRequestError(f"{form.field} has {len(rows)} rows, and the limit is {most} ({form.limit})")
        grid = self._grid(item.grid, len(rows), is_needed=needs_grid)
        data = form.data(rows, self._dtype)
        return MediaTensor(self._dtype, [len(rows), self._width], Buffer(data)), len(rows), grid

    def _grid(self, sizes: Any, num_rows: int, *, is_needed: bool) -> list[int]:
        """Return the grid of the rows as (frames, rows, columns). `[]` if the rows have no grid."""
        if sizes is None or not is_needed:
            if is_needed or sizes is not None:
                raise InvalidRequestError(
                    f"{self._facts.architecture} needs {GRID} beside the rows"
                    if is_needed
                    else f"{self._facts.architecture} takes no {GRID}: leave it out"
                )
            return []
        if isinstance(sizes, str):
            if len(sizes) > _MAX_GRID_CHARS:
                raise InvalidRequestError(f"{GRID} has {len(sizes)} characters of base64: send three numbers")
            sizes = decode_tensor(sizes, GRID)
        numbers = whole_numbers(sizes)
        merge_size = int(self._facts.hf_config.get("vision_config", {}).get("spatial_merge_size") or 2)
        grid = [numbers[0], *[number // merge_size for number in numbers[1:]]]
        is_valid = len(numbers) == NUM_AXES and min(grid) > 0 and not any(one % merge_size for one in numbers[1:])
        if not is_valid or grid[0] != 1 or grid[1] * grid[2] != num_rows:
            raise InvalidRequestError(
                f"{GRID} is {_short(numbers)} for {num_rows} rows: expected [1, height, width] in patches, of which "
                f"squares of {merge_size} x {merge_size} are a row"
            )
        return grid


def _short(numbers: list[int]) -> str:
    """Return the numbers of a grid for an error message."""
    return str(numbers) if len(numbers) <= NUM_AXES else f"a tensor of {len(numbers)} numbers"


def _around(probe: Result, placeholder: str, row_id: int, num_rows: int, architecture: str) -> tuple[str, list[int]]:
    """Return the text and the tokens of an item with `num_rows` rows; each row is the token `row_id`.

    Raises:
        MediaError: this model's rows are not contiguous in its prompts, or their number is fixed.
    """
    first = probe.token_ids.index(row_id)
    end = first + probe.num_rows
    if set(probe.token_ids[first:end]) != {row_id}:
        raise MediaError(
            f"{architecture} has marks between the rows of an item, which do not tell where these belong: send the "
            "item itself"
        )
    if num_rows == probe.num_rows:
        return probe.replacement, probe.token_ids
    if probe.replacement.count(placeholder) != probe.num_rows:
        raise MediaError(f"it has {num_rows} rows, and each item of {architecture} has {probe.num_rows}")
    before, _, after = probe.replacement.partition(placeholder * probe.num_rows)
    tokens = [*probe.token_ids[:first], *[row_id] * num_rows, *probe.token_ids[end:]]
    return f"{before}{placeholder * num_rows}{after}", tokens
