"""Tokenizers of transformers, which vLLM's API returns to scripts."""

from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer


def as_transformers(own: "Tokenizer") -> PreTrainedTokenizerBase:
    """Return the tokenizer of an engine as a tokenizer of transformers: `__call__`, `apply_chat_template`, ..."""
    named = {name: text for name, text in own.special_tokens.items() if name.endswith("_token")}
    found = PreTrainedTokenizerFast(
        tokenizer_object=own.fast, model_input_names=["input_ids", "attention_mask"], **named
    )
    found.chat_template = own.chat_template if len(own.chat_templates) < 2 else dict(own.chat_templates)
    return found


def get_tokenizer(tokenizer_name: str, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory or with a hub id."""
    options.pop("tokenizer_mode", None)
    return AutoTokenizer.from_pretrained(tokenizer_name, **options)
