"""Facts, which are read or measured rather than set: of the model and of the devices; and the cache plan."""

from typing import Any, Literal

from msgspec import Struct

from octavo.protocol.config.model import ModelImpl, TokenizerMode
from octavo.protocol.media import Kind
from octavo.protocol.pooling import PoolingFacts


class MediaFacts(Struct, frozen=True, kw_only=True):
    """A model that reads images, video or audio. The other facts are those of its language model."""

    architecture: str
    """Architecture of the complete model, as in `config.json`: "LlavaForConditionalGeneration"."""
    hf_config: dict[str, Any]
    """The complete `config.json`."""
    token_ids: dict[Kind, int | None]
    """The kinds of media that it reads, each with the placeholder token of its rows in prompts. None if the rows are
    attended to instead (cross-attention)."""
    processor_path: str
    """Local directory with the processor's files."""
    attended_rows: int = 0
    """Number of rows that the encoder outputs for 30 seconds of audio and that every token attends to
    (cross-attention); 0 if the encoder outputs are rows of the prompt."""
    aligned_layers: list[int] = []
    """Layers whose cross-attention follows the audio and thus tells when a token is spoken. Empty if none are known."""
    has_any_size: bool = False
    """Whether an item of any size is encoded in one step, so that the largest item determines memory and time of a
    step."""
    deeper_rows: int = 0
    """Number of extra encoder rows per image row, which the language model adds after its first layers, one per layer
    (DeepStack)."""
    both_ways_rows: int = 0
    """Number of rows per image that attend to each other in both directions in the language model; 0 if they attend
    like text."""
    marks_sounds: bool = False
    """Whether audio rows differ in a prompt that also has images (`BESIDE_IMAGES`)."""
    adapters: dict[Kind, str] = {}
    """Local directories of the model's own LoRA adapters, by kind of media. A prompt that names no adapter gets the one
    of the first of these kinds that it contains."""
    adapter_rank: int = 0
    """The largest rank of these adapters."""
    vector_width: int = 0
    """Length of the vector that the encoder outputs for an image that is a prompt by itself (CLIP); 0 if the encoder
    outputs are rows of prompts."""
    vector_patches: int = 0
    """Number of patches of such an image: its cost in terms of `max_num_encoder_tokens`."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Facts from the model's files, read by the frontend before any process starts."""

    model_path: str
    """Local directory or .gguf file."""
    tokenizer_path: str | None
    """Local directory with `tokenizer.json` (for a GGUF: created from its metadata and cached). None if this engine has
    no tokenizer."""
    tokenizer_mode: TokenizerMode = "auto"
    """Which tokenizer files are read."""
    load_format: str
    """"safetensors", "pt", "mistral", "gguf" or "dummy"."""
    architecture: str
    """From `config.json` `architectures[0]`, e.g. "LlamaForCausalLM"."""
    hf_config: dict[str, Any]
    """`config.json`. For a GGUF, the same keys created from its metadata."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    checkpoint_dtype: str
    """"bfloat16", "float16" or "float32". A quantized GGUF counts as "bfloat16"."""
    eos_token_ids: list[int]
    """From `generation_config.json`, else from `config.json`."""
    generation_defaults: dict[str, Any] = {}
    """Default sampling parameters from `generation_config.json`: temperature, top_p, top_k, ..."""
    model_impl: ModelImpl = "auto"
    """The model implementation to use."""
    trust_remote_code: bool = False
    """Whether code in the model's directory may be executed."""
    pooling: PoolingFacts | None = None
    """How the model computes vectors or scores. None if it generates tokens."""
    media: MediaFacts | None = None
    """The media that it reads. None if it reads only text."""

    @property
    def embedding_width(self) -> int:
        """Length of a token's embedding; 0 if `config.json` does not contain it."""
        keys = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")  # OPT's first key differs from its second
        return next((int(self.hf_config[key]) for key in keys if self.hf_config.get(key)), 0)


class CacheGroupSpec(Struct, frozen=True, kw_only=True):
    """Layers whose KV is in blocks with the same ids: one block table serves all of them.

    All groups allocate blocks from one memory pool. A block has room for as many layers as the largest group has.

    All layers with a recurrent state form one group, the last one. It has slots instead of blocks, each for the state
    of one request.
    """

    kind: Literal["full", "window", "chunk", "state"] = "full"
    """"full": every position is read until the request ends. "window": a token reads the last `window` positions.
    "chunk": a token reads the positions of its own chunk of `window` positions. "state": a token reads the state after
    the previous token."""
    window: int = 0
    """In tokens; 0 for "full". For "state": tokens between two checkpoints, a multiple of the block size; 0 if chosen
    by the size of the state."""
    num_layers: int
    """Number of layers on this worker. A pipeline stage may have none of a group's layers."""
    block_bytes: int
    """Bytes of one block or one state, over all layers of the group on this worker."""


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """Measurements of one worker, after loading its weights and running a profiling step."""

    rank: int
    device_name: str
    total_bytes: int
    free_bytes: int
    """Free memory before the weights were loaded. On a CPU, the available memory within the cgroup."""
    weights_bytes: int
    activation_bytes: int
    """Peak memory of a step with `max_num_batched_tokens` tokens and `max_num_seqs` samples, in addition to the
    weights."""
    graph_bytes: int = 0
    """Memory of the CUDA graphs of all sizes."""
    adapter_bytes: int = 0
    """Memory of the LoRA adapter slots."""
    exchange_bytes: int = 0
    """This worker's share of the memory through which engines that share the experts exchange rows."""
    cpu_kernels: str = ""
    """The CPU kernels, as far as bits depend on them: "native avx512" or "torch 2.13". Empty on a GPU."""
    cache_groups: list[CacheGroupSpec]
    """The KV cache groups of the model, in the order used in all messages."""
    model_impl: ModelImpl = "octavo"
    """The model implementation in use."""
    variant_module: str = ""
    """The first module whose rows depend on the batch. Empty if there is none."""
    host_block_s: float = 0.0
    """Seconds to copy a block from host memory; 0 if no blocks are kept there."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block, which any group except that of states may use."""
        return max([group.block_bytes for group in self.cache_groups if group.kind != "state"], default=0)

    @property
    def has_blocks(self) -> bool:
        """Whether any layer of the model has KV. This pipeline stage may have none."""
        return any(group.kind != "state" for group in self.cache_groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one request; 0 without recurrent layers."""
        return sum(group.block_bytes for group in self.cache_groups if group.kind == "state")


class CachePlan(Struct, frozen=True, kw_only=True):
    """Size of the KV cache, decided by the core from the facts of all workers."""

    blocks_per_group: list[int]
    """The number of blocks, repeated for each of `DeviceFacts.cache_groups`, because any group may use any block. For
    the group of states, the number of its slots."""
    block_size: int
    max_model_len: int
    kv_cache_bytes: int
    cache_groups: list[CacheGroupSpec] = []
    """Cache groups of the complete model. Empty if every group keeps every token."""
    max_request_blocks: int = 0
    """Most blocks that a request of `max_model_len` tokens holds at a time; 0 if one per `block_size` tokens."""

    max_request_states: int = 0
    """Most state slots that a request holds at a time; 0 if the model has no states."""
    num_host_blocks: int = 0
    """Number of blocks in the host memory of each worker, for evicted contents."""
    host_block_bytes: int = 0
    """Bytes of one of these blocks, all workers together."""
    host_block_s: float = 0.0
    """`DeviceFacts.host_block_s` of the slowest worker."""
    num_host_states: int = 0
    """Number of recurrent states in the host memory of each worker, for evicted checkpoints."""
    host_state_bytes: int = 0
    """Bytes of one of these states, all workers together."""
    host_state_s: float = 0.0
    """Seconds to copy one of these states from host memory; 0 if unknown."""

    @property
    def has_states(self) -> bool:
        """Whether the last group is a group of states."""
        return bool(self.cache_groups) and self.cache_groups[-1].kind == "state"

    @property
    def num_blocks(self) -> int:
        """Number of blocks, which all groups share. Number of slots if there are only states."""
        return self.blocks_per_group[0]

    @property
    def num_states(self) -> int:
        """Number of slots of states."""
        return self.blocks_per_group[-1] if self.has_states else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit in the cache. With several groups, windows or states: of requests of
        `max_model_len` tokens."""
        by_states = self.num_states * self.max_model_len // self.max_request_states if self.max_request_states else None
        if self.has_states and len(self.cache_groups) == 1:
            return by_states or 0
        if self.max_request_blocks:
            by_blocks = self.num_blocks * self.max_model_len // self.max_request_blocks
        else:
            by_blocks = self.num_blocks * self.block_size
        return by_blocks if by_states is None else min(by_blocks, by_states)

    @property
    def max_concurrency(self) -> float:
        """Number of requests of `max_model_len` tokens that fit at the same time."""
        return self.num_tokens / self.max_model_len
