"""The bytes of each token id, derived from the tokenizer's own decoder.

Every supported decoder maps a token to bytes independently of its neighbours, except for a space at the start of a
text. This makes exact incremental decoding possible: the text is the UTF-8 decoding of the joined bytes. This module
does not decode text itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from octavo.protocol.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_NUM_POSSIBLE_IDS = 2**32


def byte_characters() -> dict[int, str]:
    """Return the printable character with which byte-level BPE represents each byte.

    Bytes that are printable in Latin-1 represent themselves. The others are, in order, the characters from U+0100 on.
    The table is part of GPT-2's vocabulary format.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}


_CLEANUPS = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" '{end}", f"'{end}") for end in ("s", "ve", "re")),
)
"""Replacements that the WordPiece decoder of `tokenizers` makes in each token."""


class TokenBytes:
    """Bytes of the tokens of one tokenizer, computed on first use and cached.

    Raises:
        ConfigError: the tokenizer's decoder depends on neighbouring tokens in an unsupported way.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._steps: list[Mapping[str, Any]] = []
        self._drops_first_space = False
        """Whether the tokenizer adds a space at the start of a text, which is not shown."""
        self._drops_first_spaces = False
        """Whether the decoder removes spaces anywhere in the first token."""
        self._cleanups: Sequence[tuple[str, str]] | None = None
        """Replacements that a WordPiece decoder makes in a token; `None` for other decoders."""
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else None
        self._read_decoder(json.loads(state) if state else {"type": "Join"})

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; b"" for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is not None:
            return known
        token = self._token(token_id)
        if not token:
            return b""
        self._known[token_id] = converted = self._convert(token)
        return converted

    def _token(self, token_id: int) -> str:
        return (self._tokenizer.id_to_token(token_id) if 0 <= token_id < _NUM_POSSIBLE_IDS else None) or ""

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that starts a text, without the space that the tokenizer added."""
        if self._cleanups is not None:
            return _replaced(self._token(token_id), self._cleanups).encode()
        if self._drops_first_spaces:
            return self[token_id].replace(b" ", b"")
        return self[token_id].removeprefix(b" ") if self._drops_first_space else self[token_id]

    def _read_decoder(self, decoder: Mapping[str, Any]) -> None:
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        is_fused = False
        for step in steps:
            match step:
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if is_fused:
                    self._drops_first_space = True
                case {"type": "Metaspace", "prepend_scheme": scheme} if not is_fused:
                    self._steps.append(step)
                    self._drops_first_spaces = scheme != "never"
                case {"type": "Join"}:
                    self._steps.append(step)
                    self._drops_first_space = True
                case {"type": "WordPiece", "prefix": str(), "cleanup": bool(cleans)} if len(steps) == 1:
                    self._steps.append(step)
                    self._cleanups = _CLEANUPS if cleans else ()
                case {"type": "ByteLevel" | "ByteFallback"} | {"type": "Replace", "pattern": {"String": _}}:
                    self._steps.append(step)
                case _:
                    raise ConfigError(
                        f"tokenizer decoder {json.dumps(step)} is not supported",
                        hint="octavo reads byte-level, SentencePiece-style and WordPiece tokenizers",
                    )

    def _convert(self, token: str) -> bytes:
        for step in self._steps:
            match step["type"]:
                case "ByteLevel":
                    codes = [_BYTE_OF_CHARACTER.get(character) for character in token]
                    # An added token may contain characters outside the table; then all of it is plain text.
                    return token.encode() if None in codes else bytes(code for code in codes if code is not None)
                case "ByteFallback":
                    if match := _BYTE_TOKEN.fullmatch(token):
                        return bytes([int(match[1], 16)])
                case "Replace":
                    token = token.replace(step["pattern"]["String"], step["content"])
                case "Metaspace":
                    token = token.replace(step["replacement"], " ")
                case "Join":
                    token = " " + token
                case "WordPiece":
                    is_continued = token.startswith(step["prefix"])
                    token = token.removeprefix(step["prefix"]) if is_continued else " " + token
                    token = _replaced(token, self._cleanups or ())
        return token.encode()


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


class WholeTexts(dict[int, str | None]):
    """Texts of tokens that are complete characters, decoded on first use and cached; `None` for other tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        data = self._bytes[token_id]
        try:
            text: str | None = data.decode()
        except UnicodeDecodeError:
            text = None
        if data:  # not for ids outside the vocabulary, of which there are too many
            self[token_id] = text
        return text
