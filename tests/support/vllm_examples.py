"""vLLM's own offline examples on octavo: which there are, and a model hub of tiny models under the names they use."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from default_model import vllm_source
from peft_adapters import write_adapter
from tiny_encoders import ENCODERS
from tiny_models import BOS, EOS, TURN_END, make_tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_VOCAB_SIZE = 2048
_DECODER = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_PROMPTS = ("Prompt: 'Hello, my name is'\n", "Prompt: 'The capital of France is'\n")
_FOUR = ("Prompt:    'Hello, my name is'\n", "Prompt:    'The future of AI is'\n")

Maker = Callable[[Path], object]


def _decoder(architecture: str, config: str, **settings: object) -> Maker:
    return lambda path: make_tiny(architecture, path, class_name=config, **(_DECODER | settings))


def _encoder(name: str, **settings: object) -> Maker:
    architecture, config, own = ENCODERS[name]
    return lambda path: make_tiny(
        architecture, path, class_name=config, **(own | {"vocab_size": _VOCAB_SIZE} | settings)
    )


_LLAMA = _decoder("LlamaForCausalLM", "LlamaConfig")
_MODELS: dict[str, Maker] = {
    "facebook/opt-125m": _LLAMA,
    "lmsys/longchat-13b-16k": _LLAMA,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA,
    "Qwen/Qwen2.5-3B-Instruct": _LLAMA,
    "Qwen/Qwen3-0.6B": _decoder("Qwen3ForCausalLM", "Qwen3Config"),
    "Qwen/Qwen3-Reranker-0.6B": _decoder("Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True),
    "ibm-research/PowerMoE-3b": _decoder("MixtralForCausalLM", "MixtralConfig", **_EXPERTS),
    "jason9693/Qwen2.5-1.5B-apeach": _decoder("Qwen2ForSequenceClassification", "Qwen2Config", num_labels=2),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": _decoder("Qwen3ForSequenceClassification", "Qwen3Config", num_labels=1),
    "internlm/internlm2-1_8b-reward": _decoder("Qwen2ForTokenClassification", "Qwen2Config", num_labels=1),
    "nvidia/llama-nemotron-rerank-1b-v2": _decoder("LlamaForSequenceClassification", "LlamaConfig", num_labels=1),
    "intfloat/e5-small": _encoder("bert"),
    "BAAI/bge-reranker-v2-m3": _encoder("gte-classes"),
    "BAAI/bge-m3": _encoder("xlm-roberta"),
    "boltuix/NeuroBERT-NER": _encoder("bert-tokens"),
    "jinaai/jina-embeddings-v3": _encoder("modernbert", is_matryoshka=True),
}
"""Tiny replacement of each model that an example names."""


@dataclass(frozen=True)
class Example:
    """One script of vLLM."""

    path: str
    """Path below `examples/`."""
    model: str
    """Model that the script names."""
    shows: tuple[str, ...]
    """Expected parts of its output."""
    arguments: tuple[str, ...] = ()
    adapter: str = ""
    """LoRA adapter that it downloads."""


EXAMPLES = (
    Example("basic/offline_inference/basic.py", "facebook/opt-125m", _FOUR),
    Example(
        "basic/offline_inference/chat.py",
        "meta-llama/Llama-3.2-1B-Instruct",
        ("Write an essay about", "Generated text: "),
        ("--max-tokens", "8"),
    ),
    Example(
        "basic/offline_inference/classify.py", "jason9693/Qwen2.5-1.5B-apeach", ("Class Probabilities: [0.", "(size=2)")
    ),
    Example("basic/offline_inference/embed.py", "intfloat/e5-small", ("Embeddings: [", "(size=48)")),
    Example("basic/offline_inference/generate.py", "meta-llama/Llama-3.2-1B-Instruct", _PROMPTS, ("--top-k", "5")),
    Example("basic/offline_inference/score.py", "BAAI/bge-reranker-v2-m3", ("Score: 0.",)),
    Example(
        "deployment/async_llm_streaming.py", "meta-llama/Llama-3.2-1B-Instruct", ("All streaming examples completed!",)
    ),
    Example(
        "deployment/llm_engine_example.py",
        "Qwen/Qwen3-0.6B",
        ("RequestOutput(request_id='0'", "RequestOutput(request_id='2'", "prompt_logprobs=[None, {", "finished=True"),
    ),
    Example(
        "features/automatic_prefix_caching/automatic_prefix_caching_offline.py",
        "lmsys/longchat-13b-16k",
        ("Output: ", "Generation time: "),
    ),
    Example(
        "features/automatic_prefix_caching/prefix_caching_offline.py",
        "facebook/opt-125m",
        ("Generated answers are the same: True",),
    ),
    Example("features/context_extension/context_extension_offline.py", "Qwen/Qwen3-0.6B", ("Generated text: ",)),
    Example(
        "features/data_parallel/data_parallel_offline.py",
        "ibm-research/PowerMoE-3b",
        ("DP rank 0, Prompt: ", "DP rank 1, Prompt: "),
        ("-dp=2",),
    ),
    Example("features/logits_processor/custom.py", "facebook/opt-125m", _FOUR),
    Example("features/logits_processor/custom_req.py", "facebook/opt-125m", _FOUR),
    Example("features/logits_processor/custom_req_init.py", "facebook/opt-125m", _FOUR),
    Example(
        "features/lora/multilora_offline.py",
        "meta-llama/Llama-3.2-3B-Instruct",
        ("RequestOutput(request_id='3'", "lora_name='sql-lora2'"),
        adapter="jeeejeee/llama32-3b-text2sql-spider",
    ),
    Example("features/profiling/run_one_batch_offline.py", "meta-llama/Llama-3.2-1B-Instruct", ("Generated text: ",)),
    Example("features/profiling/simple_profiling_offline.py", "facebook/opt-125m", _PROMPTS),
    Example(
        "features/prompt_embed/prompt_embed_offline.py",
        "meta-llama/Llama-3.2-1B-Instruct",
        ("[Single Inference Output]", "Q3: Where is bigger"),
    ),
    Example(
        "features/reset_kv/reset_kv_offline.py",
        "Qwen/Qwen3-0.6B",
        ("Resetting prefix cache at 10", "RequestOutput(request_id='3'"),
    ),
    Example(
        "features/structured_outputs/structured_outputs_offline.py",
        "Qwen/Qwen2.5-3B-Instruct",
        ("Structured outputs by Choice: ", "Structured outputs by Grammar: SELECT col_"),
    ),
    Example(
        "observability/metrics/offline.py", "facebook/opt-125m", ("vllm:generation_tokens (counter) = ", "+Inf = ")
    ),
    Example(
        "pooling/classify/classification_with_lora_offline.py",
        "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        ("Class Probabilities: [",),
        adapter="AmirMohseni/skywork-qwen3-0.6b-reward-lora",
    ),
    Example("pooling/embed/embed_jina_embeddings_v3_offline.py", "jinaai/jina-embeddings-v3", ("(size=48)",)),
    Example("pooling/embed/embed_matryoshka_fy_offline.py", "jinaai/jina-embeddings-v3", ("(size=32)",)),
    Example("pooling/reward/sequence_reward_offline.py", "Skywork/Skywork-Reward-V2-Qwen3-0.6B", ("Reward",)),
    Example("pooling/reward/token_reward_offline.py", "internlm/internlm2-1_8b-reward", ("Reward: [[",)),
    Example("pooling/score/qwen3_reranker_offline.py", "Qwen/Qwen3-Reranker-0.6B", ("0.",)),
    Example("pooling/score/using_template_offline.py", "nvidia/llama-nemotron-rerank-1b-v2", ("[0.",)),
    Example("pooling/token_classify/ner_offline.py", "boltuix/NeuroBERT-NER", ("LABEL_",)),
    Example("pooling/token_embed/multi_vector_retrieval_offline.py", "BAAI/bge-m3", ("torch.Size([", "Score: ")),
    Example("rl/batch_invariance/reproducibility_offline.py", "facebook/opt-125m", _PROMPTS),
    Example("rl/pause_resume/pause_resume_offline.py", "facebook/opt-125m", ("Test passed!",)),
    Example(
        "rl/skip_loading_weights_in_engine_init.py",
        "Qwen/Qwen3-0.6B",
        ("Outputs make sense after loading real weights:",),
    ),
)
"""Examples that need no GPU, and depend only on the kind of their model."""


class TinyHub:
    """A hub cache whose models are tiny, with a tokenizer that knows the examples' words.

    Args:
        root: root of the cache: `HF_HOME`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tokenizer = _tokenizer()

    def run(self, example: Example, directory: Path) -> str:
        """Run an example in a directory and return its output.

        Raises:
            AssertionError: it fails; the message ends with what it has written.
        """
        model = self._place(example.model, _MODELS[example.model])
        if example.adapter:
            self._place(example.adapter, lambda path: write_adapter(model, path))
        script = vllm_source() / "examples" / example.path
        done = self.start(script, *example.arguments, directory=directory)
        output, _ = done.communicate(timeout=170)
        assert done.returncode == 0, output[-3000:]
        return output

    def start(self, script: Path, *arguments: str, directory: Path) -> "subprocess.Popen[str]":
        """Start a script of vLLM with the models of this hub."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.compat.vllm", script, *arguments],
            cwd=directory,
            env={**os.environ, "HF_HOME": str(self._root), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _place(self, name: str, make: Maker) -> Path:
        folder = self._root / "hub" / f"models--{name.replace('/', '--')}"
        revision = "0" * 40
        path = folder / "snapshots" / revision
        if not path.exists():
            path.mkdir(parents=True)
            make(path)
            if (path / "tokenizer.json").exists():
                self._tokenizer.save(str(path / "tokenizer.json"))
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text(revision)
        return path


def _tokenizer() -> Tokenizer:
    """Return a tokenizer like that of the tiny models, but trained on the examples: their prompts are not too long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True) for text in (BOS, EOS, TURN_END)],
    )
    texts = [(vllm_source() / "examples" / example.path).read_text() for example in EXAMPLES]
    tokenizer.train_from_iterator([*texts, "no yes " * 1000], trainer)
    return tokenizer
