"""Prompt embeddings of callers: tensors, or what `torch.save` and safetensors write, checked and converted.

Loads torch when the first ones arrive. Bounds are checked before anything is decoded.
"""

import base64
import binascii
import io
import pickle
import zipfile
from typing import TYPE_CHECKING

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.prompt_embeds import PromptEmbeds

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "prompt_embeds"

_ZIP = b"PK\x03\x04"
_MAX_HEAD_BYTES = 2**16
"""What a file may have beside the numbers of its tensor."""
_LARGEST_BYTES = 4
"""Of one number, in the types that are accepted."""


def require_embeds(config: ResolvedConfig) -> None:
    """Reject prompt embeddings unless the engine takes them.

    Raises:
        InvalidRequestError: it does not.
    """
    if not config.enable_prompt_embeds:
        raise InvalidRequestError(
            "this engine takes no prompt_embeds: start it with --enable-prompt-embeds, or send text or token ids", FIELD
        )


def embeds_of(value: object, config: ResolvedConfig, max_model_len: int) -> PromptEmbeds:
    """Return the rows of a prompt, converted to the type of the model, with their digests.

    Takes milliseconds for a long prompt: call it in a thread.

    Args:
        value: a tensor (rows, hidden size) or (1, rows, hidden size), of float32, bfloat16 or float16.
        config: of the engine.
        max_model_len: of the engine.

    Raises:
        InvalidRequestError: it is something else, has numbers that are not finite, or is too long.
    """
    import torch

    rows = _checked(value, config, max_model_len)
    given = rows
    rows = rows.to(getattr(torch, config.dtype)).contiguous()
    if not torch.isfinite(rows).all():
        is_overflow = bool(torch.isfinite(given).all())
        reason = f"too large for {config.dtype}, the type of the model" if is_overflow else "NaN or infinite"
        raise InvalidRequestError(f"prompt_embeds has numbers that are {reason}", FIELD)
    data = rows.view(torch.uint8).numpy().tobytes()
    return PromptEmbeds.pack([(0, len(rows))], data)


def decode_embeds(text: str, config: ResolvedConfig, max_model_len: int) -> "Tensor":
    """Return the tensor in a base64 text: one tensor as safetensors, or saved by `torch.save`.

    Raises:
        InvalidRequestError: the text is too long, is damaged, or holds something else.
    """
    row_bytes = config.model.embedding_width * _LARGEST_BYTES
    max_bytes = max_model_len * row_bytes + _MAX_HEAD_BYTES
    if len(text) > -(-max_bytes // 3) * 4:
        raise InvalidRequestError(
            f"prompt_embeds has {len(text)} characters of base64, more than {max_model_len} rows (max_model_len) of "
            f"{config.model.embedding_width} float32 numbers need: shorten the prompt",
            FIELD,
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters that are not ASCII
        raise InvalidRequestError(f"prompt_embeds is not base64: {error}", FIELD) from None
    return _load_saved(data) if data.startswith(_ZIP) else _load_safetensors(data)


def _checked(value: object, config: ResolvedConfig, max_model_len: int) -> "Tensor":
    """Return the rows of a tensor that can be a prompt."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise InvalidRequestError(f"prompt_embeds must be a torch.Tensor, got {type(value).__name__}", FIELD)
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
        raise InvalidRequestError("prompt_embeds must be a dense tensor with numbers", FIELD)
    rows = value.detach()
    if rows.ndim == 3 and len(rows) == 1:
        rows = rows[0]
    width = config.model.embedding_width
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise InvalidRequestError(
            f"prompt_embeds must have the shape (rows, {width}), the hidden size of this model, got "
            f"{tuple(value.shape)}",
            FIELD,
        )
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidRequestError(
            f"prompt_embeds must be float32, bfloat16 or float16, got {str(rows.dtype).removeprefix('torch.')}",
            FIELD,
        )
    if len(rows) >= max_model_len:
        raise InvalidRequestError(
            f"prompt_embeds has {len(rows)} rows, and this engine holds {max_model_len} tokens (max_model_len) with "
            "at least one generated: shorten the prompt or start the engine with a larger --max-model-len",
            FIELD,
        )
    return rows.cpu()


def _load_saved(data: bytes) -> "Tensor":
    """Return what `torch.save` wrote, read by torch's restricted unpickler."""
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            parts = file.infolist()
        is_stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
        # Else a short text could unpack to any size.
        is_safe = is_stored and sum(part.file_size for part in parts) <= len(data)
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) if is_safe else None
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise InvalidRequestError(
            "prompt_embeds is not a tensor that torch.save wrote, or it is damaged: save the tensor alone", FIELD
        ) from error
    if not is_safe:
        raise InvalidRequestError("prompt_embeds is a compressed archive, which torch.save never writes", FIELD)
    if not isinstance(content, torch.Tensor):
        raise InvalidRequestError(f"prompt_embeds holds a {type(content).__name__}: save the tensor alone", FIELD)
    return content


def _load_safetensors(data: bytes) -> "Tensor":
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"prompt_embeds is neither a safetensors file nor one of torch.save (torch 1.6 or newer): {error}", FIELD
        ) from error
    if len(tensors) != 1:
        raise InvalidRequestError(f"prompt_embeds holds {len(tensors)} tensors: save one", FIELD)
    (tensor,) = tensors.values()
    return tensor
