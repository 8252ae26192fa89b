"""The pre-tokenizers that GGUF files name."""

import pytest

from octavo.frontend.model_files.gguf.pre_tokenizers import pre_tokenization, pre_tokenizer
from octavo.frontend.text.token_bytes import byte_characters
from octavo.protocol.errors import ConfigError

TEXT = "I'LL pay 12345,\n\n HelloWorld don't\u4f60\u30a2a"
LAST = "\u4f60\u30a2a"
PIECES = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", ",", "\n\n", " HelloWorld", " don", "'t", LAST],
    "mpt": ["I", "'", "LL", " pay", " 12345", ",", "\n\n", " HelloWorld", " don", "'t", LAST],
    "starcoder": [
        *("I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ",", "\n\n", " HelloWorld", " don", "'t", LAST)
    ],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", ",\n\n", " HelloWorld", " don", "'t", LAST],
    "glm4": ["I", "'LL", " pay", " ", "123", "45", ",\n\n", " HelloWorld", " don", "'t", LAST],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ",\n\n", " HelloWorld", " don", "'t", LAST],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ",\n\n", " Hello", "World", " don", f"'t{LAST}"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", ",\n\n", " Hello", "World", " don't", LAST],
    "falcon": ["I", "'", "LL", " pay", " ", "123", "45", ",", "\n\n", " HelloWorld", " don", "'", "t"],
    "bloom": ["I'LL", " pay", " 12345", ",\n\n", " HelloWorld", f" don't{LAST}"],
    "lfm2": ["I", "'LL", " pay", " ", "123", "45", ",\n\n", " HelloWorld", " don", "'t", LAST],
    "viking": ["I'LL", " pay", " ", "1", "2", "3", "4", "5", ",\n\n", " HelloWorld", f" don't{LAST}"],
    "seed-coder": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ",", "\n\n", " HelloWorld", " don", "'t", LAST],
    "bailingmoe": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ",\n\n", " HelloWorld", " don", "'t", LAST],
    "deepseek-coder": [
        *("I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ",", "\n", "\n", " HelloWorld", " don", "'", "t"),
        *(LAST[:2], "a"),
    ],
    "deepseek-v3": ["I", "'LL", " pay", " ", "123", "45", ",\n\n", " HelloWorld", " don", "'t", LAST[:2], "a"],
}
"""Pieces of `TEXT` by the patterns that the models' own tokenizers have."""


@pytest.mark.parametrize("name", PIECES)
def test_text_is_divided_as_the_name_of_the_pre_tokenizer_says(name: str) -> None:
    byte_of = {character: byte for byte, character in byte_characters().items()}
    # Falcon divides at numbers after bytes have become characters, some of which are numbers.
    text = TEXT.removesuffix(LAST) if name == "falcon" else TEXT
    pieces = pre_tokenizer(pre_tokenization(name), adds_space=False).pre_tokenize_str(text)
    assert [bytes(byte_of[character] for character in piece).decode() for piece, _ in pieces] == PIECES[name]


def test_unknown_pre_tokenizers_are_named() -> None:
    with pytest.raises(ConfigError, match="pre-tokenizer 'superbpe' is not supported") as caught:
        pre_tokenization("superbpe")
    assert "deepseek-v3" in caught.value.hint and "--tokenizer" in caught.value.hint
