"""Facts, which are read or measured rather than set: of the model, of the devices, and the cache plan."""

from typing import Any, Literal

from msgspec import Struct

from octavo.protocol.config.model import ModelImpl, TokenizerMode
from octavo.protocol.media import Kind
from octavo.protocol.pooling import PoolingFacts


class MediaFacts(Struct, frozen=True, kw_only=True):
    """A model that reads images, video or audio. The other facts are those of its language model."""

    architecture: str
    """Of the whole model, as in `config.json`: "LlavaForConditionalGeneration"."""
    hf_config: dict[str, Any]
    """All of `config.json`."""
    token_ids: dict[Kind, int | None]
    """What it reads: each kind, with the placeholder of its rows in prompts; None: the rows are attended to."""
    processor_path: str
    """Local directory with the files of the processor."""
    attended_rows: int = 0
    """Rows that the encoder makes of 30 seconds of audio, and that every token attends to (cross-attention); 0: what
    the encoder makes are rows of the prompt."""
    aligned_layers: list[int] = []
    """Layers whose cross-attention follows the sound, so that it tells when a token is spoken; []: none are known."""
    has_any_size: bool = False
    """Whether an item of any size is encoded in one step, so that the largest one limits its memory and its time."""
    deeper_rows: int = 0
    """Further rows of the encoder beside each row of an image, which the language model adds after as many of its first
    layers (DeepStack)."""
    both_ways_rows: int = 0
    """Rows of an image that attend to each other in both directions in the language model; 0: they attend as text."""
    marks_sounds: bool = False
    """Whether the rows of a sound are others in a prompt that has images too (`BESIDE_IMAGES`)."""
    adapters: dict[Kind, str] = {}
    """Local directories of LoRA adapters of the model, by kind of media: a prompt that names none has that of the first
    of these kinds that it has."""
    adapter_rank: int = 0
    """The largest rank of these."""
    vector_width: int = 0
    """Numbers of the vector that the encoder makes of an image, which is a prompt by itself (CLIP); 0: what the encoder
    makes are rows of prompts."""
    vector_patches: int = 0
    """Patches of such an image: what one costs in `max_num_encoder_tokens`."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Facts from the model's files, read by the frontend before any process starts."""

    model_path: str
    """Local directory or .gguf file."""
    tokenizer_path: str | None
    """Local directory that holds `tokenizer.json` (for a GGUF: made from its metadata and cached); None: this engine
    has no tokenizer."""
    tokenizer_mode: TokenizerMode = "auto"
    """Which tokenizer files are read."""
    load_format: str
    """"safetensors", "pt", "mistral", "gguf" or "dummy"."""
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
    model_impl: ModelImpl = "auto"
    """What computes the model."""
    trust_remote_code: bool = False
    """Whether code in the model's directory may be run."""
    pooling: PoolingFacts | None = None
    """How it computes vectors or scores; None: it generates tokens."""
    media: MediaFacts | None = None
    """None: it reads text only."""

    @property
    def embedding_width(self) -> int:
        """Numbers of a token's embedding; 0: `config.json` does not tell."""
        keys = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")  # OPT's first one differs from its second
        return next((int(self.hf_config[key]) for key in keys if self.hf_config.get(key)), 0)


class CacheGroupSpec(Struct, frozen=True, kw_only=True):
    """Layers whose keys and values lie in blocks with the same ids: one block table serves all of them.

    All groups take their blocks from one pool of memory. A block has room for as many layers as the largest group has.

    All layers with a recurrent state are one group, the last one. It has slots of its own, each for the state of one
    request, and no blocks.
    """

    kind: Literal["full", "window", "chunk", "state"] = "full"
    """"full": every position is read until the request ends; "window": a token reads the last `window` positions;
    "chunk": it reads those of its own chunk of `window` positions; "state": it reads the state after the token before
    it."""
    window: int = 0
    """In tokens; 0 for "full". Of "state": tokens between two checkpoints, a multiple of the block size; 0: chosen by
    the size of the state."""
    num_layers: int
    """On this worker; a pipeline stage may have none of a group's layers."""
    block_bytes: int
    """Of one block, or of one state, over all layers of the group, on this worker."""


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """Measurements of one worker, after loading its weights and running a profiling step."""

    rank: int
    device_name: str
    total_bytes: int
    free_bytes: int
    """Free before the weights were loaded; on a CPU, the available memory within the cgroup."""
    weights_bytes: int
    activation_bytes: int
    """Peak of a step of `max_num_batched_tokens` tokens and `max_num_seqs` samples, above the weights."""
    graph_bytes: int = 0
    """Of the CUDA graphs of all sizes."""
    adapter_bytes: int = 0
    """Of the slots of LoRA adapters."""
    exchange_bytes: int = 0
    """This worker's share of the memory through which engines that divide the experts exchange rows."""
    cpu_kernels: str = ""
    """What it computes with on a CPU, as far as bits depend on it: "native avx512" or "torch 2.13"; "" on a GPU."""
    cache_groups: list[CacheGroupSpec]
    """The KV cache groups of the model, in the order in which all messages list them."""
    model_impl: ModelImpl = "octavo"
    """What computes the model."""
    variant_module: str = ""
    """The first module whose rows have other bits in other batches; "": there is none."""
    host_block_s: float = 0.0
    """Seconds in which a block is copied from host memory; 0: no blocks are kept there."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block, which any group but that of states may use."""
        return max([group.block_bytes for group in self.cache_groups if group.kind != "state"], default=0)

    @property
    def has_blocks(self) -> bool:
        """Whether any layer of the model has keys and values; of this pipeline stage, perhaps none."""
        return any(group.kind != "state" for group in self.cache_groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one request; 0 without layers that have one."""
        return sum(group.block_bytes for group in self.cache_groups if group.kind == "state")


class CachePlan(Struct, frozen=True, kw_only=True):
    """Size of the KV cache, decided by the core from the facts of all workers."""

    blocks_per_group: list[int]
    """The number of blocks, repeated for each of `DeviceFacts.cache_groups`: any group may use any block. That of
    states has another number, of its slots."""
    block_size: int
    max_model_len: int
    kv_cache_bytes: int
    cache_groups: list[CacheGroupSpec] = []
    """Of the whole model; []: every group keeps every token."""
    max_request_blocks: int = 0
    """Blocks that a request of `max_model_len` tokens holds at most at a time; 0: one for each `block_size` tokens."""

    max_request_states: int = 0
    """Slots of states that a request holds at most at a time; 0: the model has no states."""
    num_host_blocks: int = 0
    """Blocks in the host memory of each worker, for contents that blocks of the cache lose to others."""
    host_block_bytes: int = 0
    """Of one of them, in all workers together."""
    host_block_s: float = 0.0
    """See `DeviceFacts.host_block_s`; of the slowest worker."""
    num_host_states: int = 0
    """Recurrent states in the host memory of each worker, for checkpoints that slots lose to others."""
    host_state_bytes: int = 0
    """Of one of them, in all workers together."""
    host_state_s: float = 0.0
    """Seconds in which one of them is copied from host memory; 0: unknown."""

    @property
    def has_states(self) -> bool:
        """Whether the last group is one of states."""
        return bool(self.cache_groups) and self.cache_groups[-1].kind == "state"

    @property
    def num_blocks(self) -> int:
        """Number of blocks, which all groups share; of slots, if there are only states."""
        return self.blocks_per_group[0]

    @property
    def num_states(self) -> int:
        """Number of slots of states."""
        return self.blocks_per_group[-1] if self.has_states else 0

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in the cache; with several groups, windows or states, of requests of `max_model_len`
        tokens."""
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
        """Requests of `max_model_len` tokens that fit at the same time."""
        return self.num_tokens / self.max_model_len
