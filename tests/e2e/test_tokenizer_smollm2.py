"""The tokenizer and chat template from the default model's GGUF, against those of transformers."""

from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers_gguf import from_gguf

from octavo.frontend.model_files import read_model_facts
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ModelConfig, ModelFacts
from octavo.protocol.env import Env

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three \t tab \n newline \r\n\r\n end ",
    "It's we'll they've I'm you'd he's CAN'T",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n\n\nclass A(B[C]): ...',
    "for (int i = 0; i < n; ++i) { a[i] &= ~0xFF; } // done",
    "1 12 123 1234 3.14159 -42 1,000,000 2026-11-21 0x1F 1e-9",
    "caf\u00e9 na\u00efve \u00fcber Stra\u00dfe \u0142\u00f3d\u017a \u015e\u0131k",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \u2615",
    "e\u0301 \u00a0 \u200b \u3000 \ufeff \ufffd \x00 \x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y <|endoftext|> <repo_name>",
    "https://example.org/a?b=c&d=%20#e \u00a9 \u20ac5 \u2192 \u2211",
    "a" * 300 + " " * 50 + "!" * 40,
]

CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "one\n\n"},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": "<b>\u00e9\U0001f600</b> {{ 7 }}"},
    ],
]


@pytest.fixture(scope="module")
def facts(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    cache = tmp_path_factory.mktemp("cache")
    env = Env(
        cache_dir=cache, log_level="INFO", api_key=None, check_invariants=False, runtime_dir=cache, is_offline=True
    )
    return read_model_facts(ModelConfig(model=str(smollm2_gguf)), env)


@pytest.fixture(scope="module")
def tokenizer(facts: ModelFacts) -> Tokenizer:
    return Tokenizer.load(facts.tokenizer_path)


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    """Return the conversion by transformers, which reads the same metadata on its own (slowly)."""
    from transformers import AutoTokenizer

    return from_gguf(AutoTokenizer, smollm2_gguf)


def test_facts_of_the_default_model(facts: ModelFacts) -> None:
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.vocab_size, facts.num_layers, facts.num_heads, facts.num_kv_heads) == (49152, 30, 9, 3)
    assert (facts.head_dim, facts.max_position_embeddings, facts.eos_token_ids) == (64, 8192, [2])
    assert facts.hf_config["rope_theta"] == 100000.0
    assert facts.hf_config["tie_word_embeddings"] is True


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_transformers(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_numeral_is_cut_off_as_the_file_asks(tokenizer: Tokenizer) -> None:
    """Here transformers differs: it leaves `tokenizer.ggml.pre` out, and joins the space with the numeral."""
    cut = [tokenizer.token_string(token_id) for token_id in tokenizer.encode("a \u00bd 12")]
    assert cut == ["a", " ", "\u00bd", " ", "1", "2"]


def test_same_named_tokens_as_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == len(theirs)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("asks", [True, False])
def test_same_prompt_as_transformers(
    tokenizer: Tokenizer, theirs: Any, messages: list[dict[str, str]], asks: bool
) -> None:
    text = ChatTemplate.for_model(None, tokenizer).render(messages, add_generation_prompt=asks)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)


@settings(max_examples=examples(80, 200))
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skips=st.booleans())
def test_random_tokens_in_pieces_are_the_librarys_text(tokenizer: Tokenizer, ids: list[int], skips: bool) -> None:
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skips)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    text = "".join([*pieces, detokenizer.finish()])
    assert text == tokenizer._fast.decode(ids, skip_special_tokens=skips)
    assert text == tokenizer.decode(ids, skip_special_tokens=skips)


def test_loading_needs_neither_transformers_nor_torch(facts: ModelFacts) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom octavo.frontend.text.tokenizer import Tokenizer\n"
        "import octavo.frontend.model_files, octavo.frontend.text.chat_template\n"
        f"Tokenizer.load({facts.tokenizer_path!r}).encode('x')\n"
        "assert not {'torch', 'transformers', 'gguf', 'huggingface_hub'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
