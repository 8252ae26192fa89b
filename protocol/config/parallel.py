"""`ParallelConfig`: the user's settings for workers and engines, and where they run."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of workers, and how the model is split between them."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Number of workers that share every layer.", extra={"short": ("-tp",)})
    ] = 1
    enable_tp_invariant_inference: Annotated[
        bool,
        Meta(
            description="Compute the same tokens and logprobs on 1, 2, 4 and 8 workers of --tensor-parallel-size, on "
            "GPUs too. Settings that prevent it are rejected. The native CPU kernels do so without this "
            "flag."
        ),
    ] = False
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Divide the experts of a mixture of experts among the workers of --tensor-parallel-size, "
            "instead of the columns of each expert. With --data-parallel-size, divide them among the "
            "workers of all engines, which then compute all steps together.",
            extra={"short": ("-ep",)},
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of pipeline stages, each with a part of the layers and --tensor-parallel-size "
            "workers. This many steps are computed at once, for different requests.",
            extra={"short": ("-pp",)},
        ),
    ] = 1
    pipeline_layer_partition: Annotated[
        str | None,
        Meta(
            description="Number of layers of each stage, such as 12,10 (vLLM's VLLM_PP_LAYER_PARTITION). Default: "
            "stages with weights of about the same size, including the output weight."
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of engines behind one address, each with its own workers. A request goes to an engine "
            "with a cached prefix and a short queue; if an engine dies, its requests continue on another "
            "one.",
            extra={"short": ("-dp",)},
        ),
    ] = 1
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        Meta(
            description="Where engines run: mp, as processes of this machine; ray, as actors on the nodes of a Ray "
            "cluster, which the server joins by tcp.",
            extra={"short": ("-dpb",)},
        ),
    ] = "mp"
    distributed_executor_backend: Annotated[
        Literal["mp", "uni", "ray"],
        Meta(
            description="Where workers run: mp, as processes of this machine, or of --nnodes machines; ray, as actors "
            "on the nodes of a Ray cluster, which need octavo[ray]; uni: the same as mp, for one worker."
        ),
    ] = "mp"
    nnodes: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of machines that run the workers of one engine. octavo serve is started on each.",
            extra={"short": ("-n",)},
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(
            ge=0,
            description="Number of this machine among --nnodes. Node 0 has the engine and the HTTP server; the others "
            "run workers only.",
            extra={"short": ("-r",)},
        ),
    ] = 0
    master_addr: Annotated[str, Meta(description="Address of node 0, which the other nodes connect to.")] = "127.0.0.1"
    master_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], Meta(description="TCP port of node 0, which the other nodes connect to.")
    ] = 29501
    group_secret_key_file: Annotated[
        str | None,
        Meta(
            description="Secret key shared by all nodes, created by octavo keygen. Required unless --master-addr is "
            "on this machine. Not needed with Ray."
        ),
    ] = None

    @property
    def world_size(self) -> int:
        """Number of workers of an engine, over all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_lock_step(self) -> bool:
        """Whether the workers of all engines share the experts, so that a step of one engine is a step of all."""
        return self.enable_expert_parallel and self.data_parallel_size > 1
