"""Tensors of callers: base64 of a `torch.save` or safetensors file, or the tensors themselves.

Imports torch when the first tensor arrives. Limits are checked before anything is decoded.
"""

import base64
import binascii
import io
import math
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

_ZIP = b"PK\x03\x04"
_MAX_HEAD_BYTES = 2**16
"""Maximum bytes of a file in addition to the numbers of its tensor."""
_LARGEST_BYTES = 4
"""Maximum bytes of one number, over the accepted dtypes."""


@dataclass(frozen=True, slots=True)
class RowsForm:
    """The required form of a tensor of rows. All methods raise `InvalidRequestError` with the field's name."""

    field: str
    """Name of the field for the caller."""
    width: int
    """Numbers per row."""
    max_rows: int
    limit: str
    """Name of the setting that limits the number of rows."""

    def decode(self, text: str) -> "Tensor":
        """Return the tensor in a base64 text: one safetensors tensor, or a tensor saved by `torch.save`."""
        max_bytes = self.max_rows * self.width * _LARGEST_BYTES + _MAX_HEAD_BYTES
        if len(text) > -(-max_bytes // 3) * 4:
            raise InvalidRequestError(
                f"{self.field} has {len(text)} characters of base64, more than {self.max_rows} rows ({self.limit}) of "
                f"{self.width} float32 numbers need: shorten it",
                self.field,
            )
        return decode_tensor(text, self.field)

    def checked(self, value: object) -> "Tensor":
        """Return a float tensor (rows, width) or (1, rows, width) as (rows, width), for any number of rows."""
        import torch

        if not isinstance(value, torch.Tensor):
            raise InvalidRequestError(f"{self.field} must be a torch.Tensor, got {type(value).__name__}", self.field)
        if not is_dense(value):
            raise InvalidRequestError(f"{self.field} must be a dense tensor with numbers", self.field)
        rows = value.detach()
        if rows.ndim == 3 and len(rows) == 1:
            rows = rows[0]
        if rows.ndim != 2 or rows.shape[1] != self.width or not len(rows):
            raise InvalidRequestError(
                f"{self.field} must have the shape (rows, {self.width}), the hidden size of this model, got "
                f"{tuple(value.shape)}",
                self.field,
            )
        if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidRequestError(
                f"{self.field} must be float32, bfloat16 or float16, got {str(rows.dtype).removeprefix('torch.')}",
                self.field,
            )
        return rows.cpu()

    def data(self, rows: "Tensor", dtype: str) -> bytes:
        """Return the bytes of the rows in the model's dtype."""
        import torch

        converted = rows.to(getattr(torch, dtype)).contiguous()
        if not torch.isfinite(converted).all():
            is_overflow = bool(torch.isfinite(rows).all())
            reason = f"too large for {dtype}, the type of the model" if is_overflow else "NaN or infinite"
            raise InvalidRequestError(f"{self.field} has numbers that are {reason}", self.field)
        return converted.view(torch.uint8).numpy().tobytes()


def is_dense(tensor: "Tensor") -> bool:
    """Return whether a tensor is stored in memory with a fixed stride along each axis."""
    import torch

    return not (
        tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized
    )


def decode_tensor(text: str, field: str) -> "Tensor":
    """Return the dense tensor in a base64 text whose length the caller has checked. It is no larger than the text.

    Raises:
        InvalidRequestError: the text is damaged, or contains something else.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters that are not ASCII
        raise InvalidRequestError(f"{field} is not base64: {error}", field) from None
    tensor = _load_saved(data, field) if data.startswith(_ZIP) else _load_safetensors(data, field)
    if not is_dense(tensor):
        raise InvalidRequestError(f"{field} must be a dense tensor with numbers", field)
    # An axis with stride 0 repeats numbers, so a short text could describe any size. `numel` may overflow.
    if math.prod(tensor.shape) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise InvalidRequestError(f"{field} repeats numbers of a smaller tensor: save tensor.contiguous()", field)
    return tensor


def _load_saved(data: bytes, field: str) -> "Tensor":
    """Return the content of a `torch.save` file, read by torch's restricted unpickler."""
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            parts = file.infolist()
        is_stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
        # Otherwise a short text could unpack to any size.
        is_safe = is_stored and sum(part.file_size for part in parts) <= len(data)
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) if is_safe else None
    except Exception as error:  # a boundary: the unpickler may raise anything on an untrusted file
        raise InvalidRequestError(
            f"{field} is not a tensor that torch.save wrote, or it is damaged: save the tensor alone", field
        ) from error
    if not is_safe:
        raise InvalidRequestError(f"{field} is a compressed archive, which torch.save never writes", field)
    if not isinstance(content, torch.Tensor):
        raise InvalidRequestError(f"{field} holds a {type(content).__name__}: save the tensor alone", field)
    return content


def _load_safetensors(data: bytes, field: str) -> "Tensor":
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"{field} is neither a safetensors file nor one of torch.save (torch 1.6 or newer): {error}", field
        ) from error
    if len(tensors) != 1:
        raise InvalidRequestError(f"{field} holds {len(tensors)} tensors: save one", field)
    (tensor,) = tensors.values()
    return tensor
