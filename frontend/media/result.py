"""`result_of`: converts the output of a processor of `transformers` for one item to a message."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.media.wire import Result
from octavo.protocol.buffers import Buffer
from octavo.protocol.media import BESIDE_IMAGES, DIGEST_BYTES, PRECOMPUTED_ROWS, Kind, MediaTensor, digest_of

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
"""Outputs of a processor that describe the text, not the media."""


def result_alone(inputs: Mapping[str, Any]) -> Result:
    """Return the result of an item that is a prompt by itself: one row, and the processor's arrays by name."""
    tensors = {
        name: MediaTensor(value.dtype.name, list(value.shape), Buffer(value.tobytes()))
        for name, value in inputs.items()
    }
    return Result(
        num_rows=1,
        digest=digest_of(tensors),
        tensors={name: (one.dtype, one.shape, bytes(one.data.data)) for name, one in tensors.items()},
    )


def result_of(
    inputs: Mapping[str, Any],
    token_id: int,
    grid: Sequence[int] = (),
    *,
    duration_s: float = 0.0,
    part_rows: Sequence[int] = (),
    frame_step: float = 1.0,
) -> Result:
    """Return the result of an item.

    Args:
        inputs: numpy arrays for the model, made from a text that consists of the item's placeholder.
        token_id: token id of the placeholder of a row.
        grid: see `MediaItem.grid`.
        duration_s: duration of an audio clip.
        part_rows: see `Result`.
        frame_step: see `MediaItem.frame_step`.
    """
    alone = result_alone({name: value for name, value in inputs.items() if name not in _OF_TEXT})
    ((offsets, *_), *_) = inputs["text_replacement_offsets"]
    token_ids = inputs["input_ids"][0].tolist()
    return Result(
        replacement=offsets["replacement"],
        token_ids=token_ids,
        num_rows=token_ids.count(token_id),
        # The same frames at other positions have other keys and values.
        digest=alone.digest if frame_step == 1.0 else _with_step(alone.digest, frame_step),
        tensors=alone.tensors,
        grid=list(grid),
        duration_s=duration_s,
        part_rows=list(part_rows),
        frame_step=frame_step,
    )


def beside_images(kind: Kind, result: Result) -> Result:
    """Return the result of an item in a prompt with images. Audio clips then have other rows, and so another digest."""
    if kind != "audio" or PRECOMPUTED_ROWS in result.tensors:
        return result
    digest = hashlib.blake2b(result.digest, digest_size=DIGEST_BYTES, person=b"beside images").digest()
    tensors = {**result.tensors, BESIDE_IMAGES: ("int64", [1], bytes(8))}
    return msgspec.structs.replace(result, digest=digest, tensors=tensors)


def _with_step(digest: bytes, frame_step: float) -> bytes:
    return hashlib.blake2b(digest + struct.pack("<d", frame_step), digest_size=DIGEST_BYTES).digest()
