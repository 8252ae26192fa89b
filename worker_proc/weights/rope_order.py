"""The order of the rows of queries and keys in formats that rotate neighbours."""

from torch import Tensor


def undo_rope_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Restore the Hugging Face order of the rows of a query or key projection, whatever their element type.

    Rotary embedding pairs dimension i with i + half in Hugging Face's models and 2i with 2i + 1 in
    ggml's and Mistral's, so the two halves of every head's rows are interleaved there.
    """
    halves = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Interleave the halves of every head's rows: the reverse of `undo_rope_order`."""
    halves = tensor.view(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
