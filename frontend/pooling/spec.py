"""Converts the caller's `PoolingParams` to the engine's `PoolingSpec`."""

from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import TOKEN_TASKS, PoolingFacts, PoolingTask
from octavo.protocol.pooling_params import PoolingParams


def require_pooling(config: ResolvedConfig) -> PoolingFacts:
    """Return how the engine pools.

    Raises:
        InvalidRequestError: the engine generates text.
    """
    if config.model.pooling is None:
        raise InvalidRequestError(
            f"{config.served_model_names[0]} generates text; it computes no embeddings, classes or scores: send this "
            "request to a pooling model, or start the engine with --runner pooling (docs/pooling.md)",
            "model",
        )
    return config.model.pooling


def require_generation(config: ResolvedConfig) -> None:
    """Reject a request for text if the engine pools.

    Raises:
        InvalidRequestError: the engine pools; the message names its tasks.
    """
    if config.model.pooling is not None:
        raise InvalidRequestError(
            f"{config.served_model_names[0]} is a pooling model and generates no text: its tasks are "
            f"{', '.join(config.model.pooling.tasks)} (/v1/embeddings, /classify, /score, /rerank, /pooling)",
            "model",
        )


def embedding_width(model: ModelFacts) -> int:
    """Return the full length of an embedding vector."""
    assert model.pooling is not None
    if model.media is not None and model.media.vector_width:
        return model.media.vector_width
    if model.architecture.endswith("ForRetrieval"):
        return int(model.hf_config["embedding_dim"])
    return model.pooling.dense[-1].num_outputs if model.pooling.dense else model.embedding_width


def make_pooling_spec(params: PoolingParams, config: ResolvedConfig, task: PoolingTask | None = None) -> PoolingSpec:
    """Resolve all open values of a request.

    Args:
        params: given by the caller.
        config: configuration of the engine.
        task: task of the caller's method. `None`: the task of `params`, or else the model's default task.

    Raises:
        InvalidRequestError: a field is out of range or does not fit this model; `param` names it.
    """
    facts = require_pooling(config)
    params.verify()
    if task is not None and params.task not in (None, task):
        raise InvalidRequestError(f"task {params.task} in the parameters of a request for {task}", "task")
    task = task or params.task or facts.tasks[0]
    if task not in facts.tasks:
        raise InvalidRequestError(
            f"{config.served_model_names[0]} does not compute {task}: its tasks are {', '.join(facts.tasks)}", "task"
        )
    pooling = facts.token_pooling if task in TOKEN_TASKS else facts.pooling
    is_embedding = task in ("embed", "token_embed")
    needs_all = pooling != "last" or not facts.is_causal
    step_tag_id, returned_token_ids = _steps(params, facts, is_step=pooling == "step")
    activates = params.use_activation if params.use_activation is not None else params.normalize
    return PoolingSpec(
        task=task,
        pooling=pooling,
        use_activation=(facts.normalize if is_embedding else True) if activates is None else activates,
        dimensions=_dimensions(params, facts, embedding_width(config.model), is_embedding=is_embedding),
        step_tag_id=step_tag_id,
        returned_token_ids=returned_token_ids,
        skip_reading_prefix_cache=needs_all or bool(params.skip_reading_prefix_cache),
    )


def _dimensions(params: PoolingParams, facts: PoolingFacts, width: int, *, is_embedding: bool) -> int:
    """Return the length to which vectors are truncated. 0: they are not."""
    if not is_embedding:
        if params.dimensions is not None:
            raise InvalidRequestError("dimensions applies to embeddings only: leave it out", "dimensions")
        return 0
    wanted = params.dimensions or facts.default_dimensions
    if wanted in (0, width):
        return 0
    if facts.dimensions is None:
        raise InvalidRequestError(
            f"dimensions {wanted}: the vectors of this model have {width} numbers and cannot be cut: it is no "
            "Matryoshka model, or its config.json does not say so",
            "dimensions",
        )
    if facts.dimensions and wanted not in facts.dimensions:
        raise InvalidRequestError(
            f"dimensions must be one of {', '.join(map(str, facts.dimensions))} for this model, got {wanted}",
            "dimensions",
        )
    if width and wanted > width:
        raise InvalidRequestError(f"dimensions must be at most {width} for this model, got {wanted}", "dimensions")
    return wanted


def _steps(params: PoolingParams, facts: PoolingFacts, *, is_step: bool) -> tuple[int, tuple[int, ...]]:
    if not is_step:
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(f"{name} needs a model with step pooling: leave it out", name)
        return -1, ()
    tag = facts.step_tag_id if params.step_tag_id is None else params.step_tag_id
    returned = facts.returned_token_ids if params.returned_token_ids is None else tuple(params.returned_token_ids)
    if facts.num_labels and (wrong := [index for index in returned if index >= facts.num_labels]):
        raise InvalidRequestError(
            f"returned_token_ids: {wrong[0]} is not one of the {facts.num_labels} classes, from 0", "returned_token_ids"
        )
    return -1 if tag is None else tag, returned
