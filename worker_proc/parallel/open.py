"""Connects this worker to the others, in the way that its device supports."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from octavo.kernels.all_reduce.native import exchanged_bytes
from octavo.kernels.experts.exchange import ExpertExchange, exchange_area_bytes
from octavo.kernels.linear.native import NUM_SEGMENTS
from octavo.kernels.lora.native import padded_rank
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import NodeLinks, SharedMemoryGroup, group_bytes
from octavo.kernels.stage_exchange.link import SharedMemoryLink, link_bytes
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import NodePlace, WorkerSpec
from octavo.protocol.env import Env
from octavo.protocol.errors import StartupError
from octavo.worker_proc.executor.runner import PROMPT_LOGPROBS_ROWS
from octavo.worker_proc.parallel.distributed import DistributedRanks, join_all, tensor_parallel_ranks
from octavo.worker_proc.parallel.group import SharedMemoryRanks, TensorParallelGroup
from octavo.worker_proc.parallel.node_sockets import connect_nodes
from octavo.worker_proc.parallel.stage_links import DistributedStages, GraphStages, SharedMemoryStages, residual_width
from octavo.worker_proc.parallel.stages import StageExchange
from octavo.worker_proc.parallel.symmetric import open_symmetric_ranks
from octavo.worker_proc.weights.load import torch_dtype


@dataclass(frozen=True, slots=True)
class Peers:
    """The other workers, from this worker's view."""

    group: TensorParallelGroup | None
    """Ranks that share its layers; `None` if there are no others."""
    stages: StageExchange | None
    """Link to the stages with the previous and the next layers; `None` if this one has all layers."""
    barrier: Callable[[], None]
    """Blocks until every worker has called it."""
    engines: ExpertExchange | None = None
    """Exchange with all engines, if they divide the experts."""


def join_peers(spec: WorkerSpec, library: NativeLibrary | None, device: torch.device, env: Env) -> Peers:
    """Join the other workers, of which there is at least one.

    Args:
        spec: spec of this worker.
        library: computes with the model; `None` if torch does.
        device: device of this worker.
        env: selects how GPUs sum tensors.

    Raises:
        StartupError: the workers cannot exchange anything.
    """
    if library is None:
        if spec.config.is_lock_step:
            raise StartupError(
                "--enable-expert-parallel with --data-parallel-size needs the native kernels, which cannot be used",
                hint="leave out --enable-expert-parallel; the log says why there are no native kernels",
            )
        return _through_torch(spec, device, env)
    try:
        peers = _through_memory(spec, library) if spec.world_size > 1 else Peers(None, None, lambda: None)
        return _with_engines(peers, spec, library) if spec.config.is_lock_step else peers
    except OSError as error:
        raise StartupError(f"no memory to share with the other workers: {error}", hint="free some memory") from error


def _through_torch(spec: WorkerSpec, device: torch.device, env: Env) -> Peers:
    config = spec.config
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    join_all(config.device, _store(spec), spec.rank, spec.world_size)
    everyone = DistributedRanks(spec.rank, spec.world_size)
    if num_stages == 1:
        has_one_shot = env.has_one_shot_all_reduce and config.device == "cuda"
        return Peers(_symmetric_ranks(spec, device) if has_one_shot else everyone, None, everyone.barrier)
    if env.has_one_shot_all_reduce and config.device == "cuda":
        raise StartupError("OCTAVO_ONE_SHOT_ALL_REDUCE: not with --pipeline-parallel-size", hint="unset it")
    width, dtype = residual_width(config.model), torch_dtype(config)
    stages: StageExchange = (link := DistributedStages(spec.rank, size, width, dtype, device))
    if config.device == "cuda":
        stages = GraphStages(link, config.max_num_batched_tokens, width, dtype, device)
    group = tensor_parallel_ranks(spec.rank, size, num_stages) if size > 1 else None
    return Peers(group, stages, everyone.barrier)


def _symmetric_ranks(spec: WorkerSpec, device: torch.device) -> TensorParallelGroup:
    """Return ranks on one machine that read each other's memory."""
    if spec.place is not None and len(spec.place.link_addresses) > 1:
        raise StartupError(
            "OCTAVO_ONE_SHOT_ALL_REDUCE: the GPUs are on several machines, and cannot read each other's memory",
            hint="unset it",
        )
    config, dtype = spec.config, torch_dtype(spec.config)
    return open_symmetric_ranks(
        spec.rank,
        config.tensor_parallel_size,
        width=_width(config),
        dtype=dtype,
        part_dtype=torch.float32 if config.enable_tp_invariant_inference else dtype,
        device=device,
    )


def _through_memory(spec: WorkerSpec, library: NativeLibrary) -> Peers:
    """Lay out the shared file: the part of all workers, then each stage's, then the links between stages."""
    config, descriptor = spec.config, spec.exchange_fd
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage, rank = config.place_of(spec.rank)
    area_bytes = _area_bytes(config)
    is_on_nodes = spec.place is not None and len(spec.place.link_addresses) > 1
    if is_on_nodes and num_stages > 1:
        raise StartupError(
            "the native kernels pass hidden states from stage to stage through memory, and the stages are on several "
            "machines",
            hint="use --cpu-kernels torch, or --tensor-parallel-size instead of --pipeline-parallel-size",
        )
    if num_stages == 1:
        links = _links(spec.place, spec.rank) if spec.place and is_on_nodes else None
        group = SharedMemoryRanks(SharedMemoryGroup(library, descriptor, rank, size, area_bytes, links=links))
        return Peers(group, None, group.barrier)
    width = residual_width(config.model)
    row_bytes = exchanged_bytes(1, 2 * width, 1)
    step_bytes = config.max_num_batched_tokens * row_bytes
    first_stage = group_bytes(0)
    first_link = first_stage + num_stages * group_bytes(area_bytes)
    os.ftruncate(descriptor, first_link + (num_stages - 1) * size * link_bytes(step_bytes))

    def link(sender: int) -> SharedMemoryLink:
        place = sender * size + rank
        return SharedMemoryLink(descriptor, first_link + place * link_bytes(step_bytes), step_bytes)

    everyone = SharedMemoryGroup(library, descriptor, spec.rank, spec.world_size, 0)
    offset = first_stage + stage * group_bytes(area_bytes)
    return Peers(
        SharedMemoryRanks(SharedMemoryGroup(library, descriptor, rank, size, area_bytes, offset=offset))
        if size > 1
        else None,
        SharedMemoryStages(
            link(stage - 1) if stage else None, link(stage) if stage < num_stages - 1 else None, width, library
        ),
        everyone.barrier,
    )


def _with_engines(peers: Peers, spec: WorkerSpec, library: NativeLibrary) -> Peers:
    """Return the peers with those of the other engines, which share a file with ours."""
    config = spec.config
    num_engines, max_rows = config.data_parallel_size, config.max_num_batched_tokens
    width, top_k = int(config.model.hf_config.get("moe_latent_size") or _width(config)), _num_chosen_experts(config)
    group = SharedMemoryGroup(
        library,
        spec.engines_fd,
        config.engine_index * spec.world_size + spec.rank,
        num_engines * spec.world_size,
        exchange_area_bytes(num_engines, max_rows, width, top_k),
    )
    engines = ExpertExchange(
        group,
        config.engine_index,
        num_engines,
        is_publisher=spec.rank == 0,
        max_rows=max_rows,
        width=width,
        top_k=top_k,
    )
    return replace(peers, barrier=group.barrier, engines=engines)


NUM_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
"""Keys of `config.json` for the number of experts per token."""


def _links(place: NodePlace, rank: int) -> NodeLinks:
    is_first = rank == place.first_ranks[place.node]
    return NodeLinks(place.first_ranks, place.node, connect_nodes(place) if is_first else {})


def _store(spec: WorkerSpec) -> Store:
    """Return the store through which ranks that compute through torch find each other."""
    if spec.place is None:
        return FileStore(spec.rendezvous, spec.world_size)
    host, _, port = spec.place.link_addresses[0].rpartition(":")
    is_first = spec.rank == 0
    return TCPStore(
        host, int(port), spec.world_size, is_first, master_listen_fd=spec.place.listener_fd if is_first else None
    )


MAX_PARTS = 8
"""Most layers of a checkpoint that are stacked into one."""


def _area_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of the largest exchange: all logits of a step, or for each row the hidden state or its experts'
    outputs."""
    size, width, top_k = config.tensor_parallel_size, _width(config), _num_chosen_experts(config)
    max_logits = max(config.max_num_seqs, PROMPT_LOGPROBS_ROWS)
    max_rows = max(config.max_num_batched_tokens, max_logits)
    rows_bytes = top_k * exchanged_bytes(max_rows, width, size)
    if config.lora is not None:  # the sums of the segments of a layer's inputs
        rank = padded_rank(config.lora.max_rank, size) * size
        num_parts = MAX_PARTS if config.lora.is_fully_sharded else 1
        rows_bytes = max(rows_bytes, max_rows * max(NUM_SEGMENTS) * num_parts * rank * 4)
    return max(rows_bytes, max_logits * config.model.vocab_size * 4)


def _width(config: ResolvedConfig) -> int:
    """Return the largest width of the residual stream, including that of a draft model."""
    keys = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
    models = [config.model]
    if config.speculation is not None and config.speculation.head is not None:
        models.append(config.speculation.head)
    return max(int(facts.hf_config.get(key) or 0) for facts in models for key in keys)


def _num_chosen_experts(config: ResolvedConfig) -> int:
    return max(int(config.model.hf_config.get(key) or 1) for key in NUM_CHOSEN_EXPERTS)
