"""`ResolvedConfig`: the configuration of a running engine, without open values."""

from typing import Literal

import msgspec

from octavo.protocol.code import ProcessorSource
from octavo.protocol.config.engine import (
    DeviceName,
    KernelChoice,
    KVCacheDtypeName,
    RecoveryConfig,
    RemoteConfig,
    SchedulingPolicy,
)
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.kv_events import KVEventsConfig
from octavo.protocol.config.kv_transfer import (
    ResolvedKVConnector,
    ResolvedKVTransfer,
)
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.protocol.config.media import ResolvedMedia
from octavo.protocol.config.model import DtypeName, QuantizationName
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.config.prompt_embeds import embedding_bytes
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.config.structured_outputs import ResolvedStructuredOutput
from octavo.protocol.config.threads import CoreBinding
from octavo.protocol.params import LogprobsMode


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a running engine. No field means "choose for me", except that `fits_model_len` leaves the
    length to the memory."""

    model: ModelFacts
    served_model_names: list[str]
    dtype: DtypeName
    quantization: QuantizationName
    """"gguf" means: as in the file."""
    packed_weights_cache_bytes: int
    """0 if packed weights are not cached."""
    device: DeviceName
    num_threads: int
    """Most compute threads of each CPU worker."""
    cpu_kernels: KernelChoice
    cpu_binding: CoreBinding
    max_graph_size: int
    """Most requests of a decode step that has a CUDA graph; 0 if there are no graphs."""
    is_batch_invariant: bool
    """Whether products on a GPU give a row the same bits in any batch. Products on a CPU always do."""
    seed: int
    max_model_len: int
    """The limit, unless `fits_model_len`."""
    fits_model_len: bool
    """`--max-model-len auto`: the core lowers `max_model_len` to what fits in memory."""
    max_logprobs: int
    """-1 if there is no limit."""
    logprobs_mode: LogprobsMode
    logits_processors: list[ProcessorSource]
    block_size: int
    kv_cache_dtype: KVCacheDtypeName
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    """None if computed from the available memory."""
    num_blocks_override: int | None
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    full_step_tokens: int
    """0 if there is no full step."""
    decode_interval_tokens: int
    """0 if decodes are in every step."""
    step_time_target_s: float
    """0 if there is no target."""
    long_prefill_token_threshold: int
    """0 if there is no limit."""
    scheduling_policy: SchedulingPolicy
    async_scheduling: bool
    stream_interval: int
    """In tokens."""
    max_num_queued_reqs: int
    """0 if there is no limit."""
    max_num_queued_tokens: int
    """In prompt tokens; 0 if there is no limit."""
    structured_output: ResolvedStructuredOutput
    recovery: RecoveryConfig
    world_size: int
    """Number of workers, over all stages."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages."""
    stage_layers: list[int] = []
    """Number of layers of each stage. Empty if they are divided by the size of their weights."""
    calculate_kv_scales: bool = False
    """Whether workers measure the scales of the KV cache when they start."""
    enable_tp_invariant_inference: bool = False
    """Whether a request's bits must not depend on the number of workers that share the layers."""
    enable_expert_parallel: bool = False
    """Whether the workers of all engines share the experts of a mixture, instead of the columns of each expert."""
    data_parallel_size: int = 1
    """Number of engines that share the requests, all on this machine."""
    engine_index: int = 0
    """Index of this engine."""
    engine_place: int = 0
    """Determines which of the machine's GPUs and cores the engine uses: those after the engines with lower places. An
    engine that replaces another one has the same place."""
    executor: Literal["mp", "ray"] = "mp"
    """What starts the workers."""
    model_name: str = ""
    """`--model` as the user has written it: a path or a hub id."""
    num_nodes: int = 1
    """Number of machines started by an external launcher; 1 if only this one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    group_secret_key_file: str | None = None
    """None if all nodes are on this machine."""
    log_stats: bool
    record_steps: str | None
    kv_events: KVEventsConfig | None = None
    """None if nothing is published."""
    remote: RemoteConfig
    """Both files, or neither. Without them the engine has no keys and no address that other machines can reach."""
    chat_template: str | None
    """The template given on the command line. None for the model's own."""
    lora: ResolvedLoRA | None = None
    """None if there are no adapters."""
    speculation: ResolvedSpeculation | None = None
    """None if each step computes one token per output."""
    enable_prompt_embeds: bool = False
    """Whether given rows may replace token embeddings in a prompt."""
    media: ResolvedMedia | None = None
    """None if the model reads only text."""
    download_dir: str | None = None
    """For adapters from the hub. None for the hub's own cache."""
    kv_offloading_bytes: int = 0
    """Host memory of all workers for evicted KV blocks in bytes; 0 if there is none."""
    kv_connector: ResolvedKVConnector | None = None
    """User code that stores KV blocks, instead of files. None if there is none."""
    kv_transfer: ResolvedKVTransfer | None = None
    """None if KV blocks are not exchanged with other engines."""
    kv_offloading_path: str = ""
    """Directory for files of KV blocks. Empty if there are none."""
    kv_offloading_disk_bytes: int = 0
    """Limit for all files there."""
    num_scheduler_steps: int = 1
    """Most decode steps of one plan."""
    kv_offloading_recompute: bool = True
    """Whether blocks that are slower to copy than to compute are recomputed."""

    @property
    def interrupts_plans(self) -> bool:
        """Whether a worker ends a plan of several steps when another command arrives, if its model has no states.

        Several workers would learn of the command in different steps, and wait for one another.
        """
        return self.world_size == 1

    @property
    def stores_blocks(self) -> bool:
        """Whether full KV blocks are stored outside of the workers' memory, in files or by a connector."""
        return bool(self.kv_offloading_path) or self.kv_connector is not None

    @property
    def forks_workers(self) -> bool:
        """Whether all workers run on this machine's CPUs and may be forked from a process that has imported torch.

        Workers on GPUs are not forked, because that has not been tested.
        """
        return self.device == "cpu" and self.executor == "mp" and self.num_nodes == 1

    @property
    def takes_rows(self) -> bool:
        """Whether a step may use given rows instead of token embeddings: prompt embeddings, or media rows."""
        has_rows = self.media is not None and not self.media.attended_rows and not self.media.vector_width
        return self.enable_prompt_embeds or has_rows

    @property
    def num_deeper_rows(self) -> int:
        """See `MediaFacts.deeper_rows`."""
        return 0 if self.model.media is None else self.model.media.deeper_rows

    @property
    def media_row_width(self) -> int:
        """Values per media row, including the extra rows of deeper layers."""
        return self.model.embedding_width * (1 + self.num_deeper_rows)

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether tokens attend to later ones, so that a prompt is computed in one step and shares nothing."""
        return is_computed_whole(self.model)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of workers that share every layer."""
        return self.world_size // self.pipeline_parallel_size

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one row of prompt embeddings."""
        return embedding_bytes(self.model, self.dtype)

    @property
    def is_lock_step(self) -> bool:
        """Whether the workers of all engines share the experts, so that a step of one engine is a step of all."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def answering_rank(self) -> int:
        """The rank that sends the results of steps: the first one of the last stage."""
        return self.rank_of(self.pipeline_parallel_size - 1, 0)

    def rank_of(self, stage: int, tensor_parallel_rank: int) -> int:
        """Return the rank of a worker. The ranks of a stage are consecutive."""
        return stage * self.tensor_parallel_size + tensor_parallel_rank

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the stage of a worker, and its tensor parallel rank within that stage."""
        return divmod(rank, self.tensor_parallel_size)

    @property
    def ranks_per_node(self) -> int:
        """Number of workers of this engine on each of `num_nodes` machines."""
        return self.world_size // self.num_nodes
