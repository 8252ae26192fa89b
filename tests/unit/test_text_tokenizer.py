"""The tokenizer: round trips, the `tokenizers` library's own decoding, files beside tokenizer.json."""

import json
from base64 import b64encode
from pathlib import Path

import pytest
import small_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import ConfigError

TOKENIZERS = {"byte-level": small_tokenizers.byte_level(), "sentencepiece": small_tokenizers.sentencepiece()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def library_decode(tokenizer: Tokenizer, ids: list[int], *, skips: bool) -> str:
    return tokenizer._fast.decode(ids, skip_special_tokens=skips)


def save(tokenizer: Tokenizer, directory: Path, **settings: object) -> Path:
    tokenizer._fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@every_tokenizer
@given(st.text().filter(lambda text: "\u2581" not in text))  # SentencePiece's own sign for a space
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 280)), st.booleans())
def test_byte_level_decoding_equals_the_librarys(ids: list[int], skips: bool) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode(ids, skip_special_tokens=skips) == library_decode(tokenizer, ids, skips=skips)


@given(st.lists(st.sampled_from(["the a", "  ", "h\u00e9", "\U0001f600", "<|end|>", "<tool>"])), st.booleans())
def test_sentencepiece_decoding_equals_the_librarys_on_whole_characters(parts: list[str], skips: bool) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [token_id for part in parts for token_id in tokenizer.encode(part)]
    assert tokenizer.decode(ids, skip_special_tokens=skips) == library_decode(tokenizer, ids, skips=skips)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(st.lists(st.integers(0, 20)))
def test_metaspace_decoding_equals_the_librarys(scheme: str, ids: list[int]) -> None:
    vocab = {piece: place for place, piece in enumerate(small_tokenizers.PIECES)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    fast.decoder = decoders.Metaspace(prepend_scheme=scheme)
    assert Tokenizer(fast).decode(ids) == fast.decode(ids)


@pytest.mark.parametrize("cleans", [True, False])
@given(st.lists(st.integers(0, 13)))
def test_wordpiece_decoding_equals_the_librarys(cleans: bool, ids: list[int]) -> None:
    words = ["[UNK]", "un", "##believ", "##able", "##s", ".", "!", "'", "'s", "##'", "n't", "do not", "##,", "a"]
    fast = FastTokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece(cleanup=cleans)
    assert Tokenizer(fast).decode(ids) == fast.decode(ids)


@given(st.lists(st.integers(0, 20)))
def test_decoding_without_a_decoder_equals_the_librarys(ids: list[int]) -> None:
    fast = FastTokenizer(models.WordLevel({f"w{number}": number for number in range(15)}, unk_token="w0"))
    assert Tokenizer(fast).decode(ids) == fast.decode(ids)


def test_token_string_is_what_a_token_adds_inside_a_text() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert [tokenizer.token_string(token_id) for token_id in tokenizer.encode("the a")] == [" the", " a"]
    assert tokenizer.token_bytes(1 + 0xF0) == b"\xf0"
    assert tokenizer.token_string(1 + 0xF0) == "\ufffd"
    assert [tokenizer.token_name(token_id) for token_id in tokenizer.encode("the a")] == ["▁the", "▁a"]


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(token_id: int) -> None:
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.token_string(token_id) == ""
        assert tokenizer.decode([token_id]) == ""


def test_lone_surrogates_are_replaced() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode_batch(["a\ud800b", "\ud83d\ude00"]) == [
        tokenizer.encode("a\ufffdb"),
        tokenizer.encode("\U0001f600"),
    ]


def test_named_special_tokens_and_ids() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == small_tokenizers.SPECIAL
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} == tokenizer.special_token_ids
    assert tokenizer.vocab_size == tokenizer._fast.get_vocab_size()


def test_load_reads_special_tokens_in_both_forms(tmp_path: Path) -> None:
    save(TOKENIZERS["byte-level"], tmp_path, bos_token="<|start|>", eos_token={"content": "<|end|>"}, pad_token=None)
    assert Tokenizer.load(tmp_path).special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_a_named_token_is_special_even_if_the_tokenizer_file_has_it_as_ordinary(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save(Tokenizer(fast), tmp_path, eos_token="</s>", pad_token="</s>", bos_token="<absent>")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_token_ids == {1}
    assert tokenizer.encode("b</s>") == [2, 1]
    assert tokenizer.decode([2, 1]) == "b"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (3, None)


def test_load_drops_padding_and_truncation(tmp_path: Path) -> None:
    fast = FastTokenizer.from_str(TOKENIZERS["byte-level"]._fast.to_str())
    fast.enable_truncation(2)
    fast.enable_padding(length=9)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("xyz")) == 3


def test_chat_templates_of_tokenizer_config(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    save(TOKENIZERS["byte-level"], tmp_path, chat_template=templates)
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    assert Tokenizer.load(tmp_path).chat_template == "A"


def test_a_chat_template_file_wins(tmp_path: Path) -> None:
    save(TOKENIZERS["byte-level"], tmp_path, chat_template="A")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "B"}')
    assert Tokenizer.load(tmp_path).chat_template == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "C", "rag": "D"}


def test_a_directory_without_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer in") as caught:
        Tokenizer.load(tmp_path)
    assert "--tokenizer" in caught.value.hint


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "[]"])
def test_a_malformed_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in caught.value.message


def test_a_decoder_that_cannot_be_followed_is_rejected() -> None:
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    fast.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(fast)


def tekken(directory: Path) -> None:
    """Write a small tokenizer in Mistral's form: the bytes, some words, five special tokens of ten."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor"]
    special = ("<unk>", "<s>", "</s>", "[INST]", "<pad>")
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    content = {
        "config": {"pattern": pattern, "default_vocab_size": len(tokens) + 10, "default_num_special_tokens": 10},
        "vocab": [{"rank": rank, "token_bytes": b64encode(token).decode()} for rank, token in enumerate(tokens)],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(special)],
    }
    (directory / "tekken.json").write_text(json.dumps(content))


def test_mistrals_own_file(tmp_path: Path) -> None:
    tekken(tmp_path)
    for mode in ("mistral", "auto"):
        tokenizer = Tokenizer.load(tmp_path, mode)  # type: ignore[arg-type]
        # The ids are those of mistral-common 1.13.1, encode(..., bos=True, eos=False).
        assert tokenizer.encode("hello wor\u00e9 1") == [1, 269, 272, 205, 179, 42, 59]
        assert tokenizer.encode("hello", add_special_tokens=False) == [269]
        assert tokenizer.decode([1, 269, 272, 205, 179]) == "hello wor\u00e9"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert 3 in tokenizer.special_token_ids


def test_a_mode_reads_its_own_file(tmp_path: Path) -> None:
    save(TOKENIZERS["byte-level"], tmp_path)
    with pytest.raises(ConfigError, match=r"no tekken\.json in"):
        Tokenizer.load(tmp_path, "mistral")
    with pytest.raises(ConfigError, match=r"no tokenizer in .*: neither"):
        Tokenizer.load(tmp_path / "nowhere", "slow")
    with pytest.raises(ConfigError, match=r"only tokenizer\.json, which mode slow does not read") as caught:
        Tokenizer.load(tmp_path, "slow")
    assert caught.value.hint == "leave out --tokenizer-mode slow"
    tekken(tmp_path)
    assert Tokenizer.load(tmp_path).vocab_size == TOKENIZERS["byte-level"].vocab_size
    assert Tokenizer.load(tmp_path, "mistral").vocab_size == 273
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"only tekken\.json, which mode hf does not read"):
        Tokenizer.load(tmp_path, "hf")


def test_code_of_a_tokenizer_does_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "y")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "code.py").write_text("raise SystemExit('this code must not run')\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Theirs", null]}}')
    with pytest.raises(ConfigError, match="code in its repository, which octavo never runs") as caught:
        Tokenizer.load(tmp_path)
    assert not questions
    assert "--tokenizer" in caught.value.hint


def test_slow_reads_what_the_tokenizer_file_was_made_from(tmp_path: Path) -> None:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*characters, "he"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, "slow")
    assert tokenizer.encode("he") == [vocabulary["he"]]
    assert tokenizer.decode(tokenizer.encode("\u00e9 he")) == "\u00e9 he"
