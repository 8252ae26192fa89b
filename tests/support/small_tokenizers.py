"""Tokenizers of a few hundred tokens, of the two kinds that models use, made in memory."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.text.token_bytes import byte_characters
from octavo.frontend.text.tokenizer import Tokenizer

SPECIAL = ("<|start|>", "<|end|>")
USER_DEFINED = ("<tool>", "caf\u00e9 \u2615")
PIECES = (
    "\u2581",
    "\u2581the",
    "\u2581a",
    "th",
    "he",
    "the",
    "in",
    "ing",
    "\u2581\u2581",
    "e",
    "t",
    "h",
    "a",
    "i",
    "n",
    "g",
)


def byte_level() -> Tokenizer:
    """Byte-level BPE: all 256 bytes, a few merges (one inside an emoji), special tokens."""
    table = byte_characters()
    vocab = {table[byte]: byte for byte in range(256)}
    words = [" t", "he", " the", "\u00e9".encode(), "\U0001f600".encode()[:2], "\U0001f600".encode()[2:], b"\xe4\xbd"]
    merges = []
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        name = "".join(table[byte] for byte in data)
        cut = 2 if word == " the" else 1
        merges.append((name[:cut], name[cut:]))
        vocab[name] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return _with_added_tokens(fast)


def sentencepiece() -> Tokenizer:
    """SentencePiece-style BPE: a token for each byte, spaces as part of words, special tokens."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in PIECES:
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("i", "n"), ("in", "g")]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added_tokens(fast)


def _with_added_tokens(fast: FastTokenizer) -> Tokenizer:
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    fast.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    return Tokenizer(fast, {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]})
