"""Prompt embeddings of callers: checks and converts tensors, and files of `torch.save` and safetensors."""

from typing import TYPE_CHECKING

from octavo.frontend.generation.tensors import RowsForm
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.prompt_embeds import PromptEmbeds

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "prompt_embeds"


def require_embeds(config: ResolvedConfig) -> None:
    """Reject prompt embeddings unless the engine accepts them.

    Raises:
        InvalidRequestError: the engine does not accept prompt embeddings.
    """
    if not config.enable_prompt_embeds:
        raise InvalidRequestError(
            "this engine takes no prompt_embeds: start it with --enable-prompt-embeds, or send text or token ids", FIELD
        )


def embeds_of(value: object, config: ResolvedConfig, max_model_len: int) -> PromptEmbeds:
    """Return the rows of a prompt, converted to the model's dtype, with their digests.

    Takes milliseconds for a long prompt: call it in a thread.

    Args:
        value: a tensor (rows, hidden size) or (1, rows, hidden size), of float32, bfloat16 or float16.
        config: the configuration of the engine.
        max_model_len: the maximum context length of the engine.

    Raises:
        InvalidRequestError: the value is something else, has non-finite numbers, or is too long.
    """
    form = _form(config, max_model_len)
    rows = form.checked(value)
    if len(rows) >= max_model_len:
        raise InvalidRequestError(
            f"prompt_embeds has {len(rows)} rows, and this engine holds {max_model_len} tokens (max_model_len) with "
            "at least one generated: shorten the prompt or start the engine with a larger --max-model-len",
            FIELD,
        )
    return PromptEmbeds.pack([(0, len(rows))], form.data(rows, config.dtype))


def decode_embeds(text: str, config: ResolvedConfig, max_model_len: int) -> "Tensor":
    """Return the tensor in a base64 text: one safetensors tensor, or a tensor saved by `torch.save`.

    Raises:
        InvalidRequestError: the text is too long, is damaged, or holds something else.
    """
    return _form(config, max_model_len).decode(text)


def _form(config: ResolvedConfig, max_model_len: int) -> RowsForm:
    return RowsForm(FIELD, config.model.embedding_width, max_model_len, "max_model_len")
