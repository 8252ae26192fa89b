"""What is measured or read rather than said: the model's facts, the devices' facts, the cache plan."""

from typing import Any

from msgspec import Struct

from octavo.protocol.config.engine import TokenizerMode


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the model's files say, read by the frontend before any process starts."""

    model_path: str
    """Local directory or .gguf file."""
    tokenizer_path: str | None
    """Local directory that holds `tokenizer.json` (for a GGUF: made from its metadata and cached); None: token ids are
    all that this engine knows."""
    tokenizer_mode: TokenizerMode = "auto"
    """Which of its files is the tokenizer's."""
    load_format: str
    """"safetensors", "gguf" or "dummy"."""
    architecture: str
    """As in `config.json` `architectures[0]`, e.g. "LlamaForCausalLM"."""
    hf_config: dict[str, Any]
    """`config.json`; for a GGUF, the same keys made from its metadata."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    checkpoint_dtype: str
    """"bfloat16", "float16" or "float32"; a quantized GGUF counts as "bfloat16"."""
    eos_token_ids: list[int]
    """From `generation_config.json`, else from `config.json`."""
    generation_defaults: dict[str, Any] = {}
    """Default sampling parameters from `generation_config.json`: temperature, top_p, top_k, ..."""


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """What one worker measured after loading its weights and running a profiling step."""

    rank: int
    device_name: str
    total_bytes: int
    free_bytes: int
    """Free before the weights were loaded: on a CPU, what the kernel calls available (within the cgroup)."""
    weights_bytes: int
    activation_bytes: int
    """Peak of a step of `max_num_batched_tokens` tokens and `max_num_seqs` samples, above the weights."""
    graph_bytes: int = 0
    """Of the CUDA graphs of all sizes."""
    kv_block_bytes: int
    """Bytes of one KV block over all layers, on this worker."""


class CachePlan(Struct, frozen=True, kw_only=True):
    """How much cache there is, decided by the core from all workers' facts."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the cache."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at the same time."""
        return self.num_tokens / self.max_model_len
