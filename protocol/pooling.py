"""Pooling: vectors, classes and scores of prompts, instead of tokens. Describes what a model can compute.

A request is described by `params.PoolingSpec`, its result by `events.PooledOutput`.
"""

from typing import Literal, TypeAlias, get_args

from msgspec import Struct

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]
"""What a request computes: one vector or one list of class scores for its prompt, or one for each of its tokens."""

PoolingType: TypeAlias = Literal["cls", "last", "mean", "all", "step"]
"""The tokens of which the result is made: the first one, the last one, the mean of all, each one separately ("all"), or
each occurrence of the step tag ("step")."""

Conversion: TypeAlias = Literal["embed", "classify"]
Activation: TypeAlias = Literal["identity", "tanh", "gelu", "relu", "sigmoid", "softmax"]

POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})
TASKS_OF: dict[Conversion, tuple[PoolingTask, ...]] = {
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "token_classify"),
}
"""The tasks of a model, the default first."""


class DenseLayer(Struct, frozen=True, kw_only=True):
    """A layer that Sentence Transformers applies to a pooled vector: `2_Dense` and similar."""

    path: str
    """Its folder, with its weights: linear.weight and linear.bias."""
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: Activation


class PoolingFacts(Struct, frozen=True, kw_only=True):
    """How a model turns hidden states into vectors or scores, according to its files and `--pooler-config`."""

    convert: Conversion
    """"embed": the hidden states are the result. "classify": a classification head computes it from them."""
    pooling: PoolingType
    """Pooling of tasks with one result per prompt. "all" and "step" mean that there are no such tasks, only results per
    token."""
    token_pooling: PoolingType = "all"
    """Pooling of tasks with one result per token: "all" or "step"."""
    is_causal: bool = True
    """False if tokens also attend to later tokens. Prompts are then computed in one step, and nothing is shared between
    them."""
    normalize: bool = True
    """Whether embeddings are normalized to length 1, unless a request says otherwise."""
    activation: Activation = "identity"
    """Activation of class scores, unless a request says otherwise."""
    num_labels: int = 0
    """Number of classes; 0 if the model has no classification head."""
    num_segments: int = 1
    """Number of token types (as in BERT) that the model distinguishes; 2 if it distinguishes the second text of a
    pair."""
    score_token_ids: tuple[int, ...] = ()
    """Two tokens, such as "no" and "yes". The only class score is the logit of the second one minus that of the first.
    Empty if the model has a classification head."""
    dense: tuple[DenseLayer, ...] = ()
    """Layers applied to pooled vectors, in order, before normalization."""
    dimensions: tuple[int, ...] | None = None
    """The lengths to which a vector may be truncated (Matryoshka). Empty if any length is valid, None if none is."""
    step_tag_id: int | None = None
    """The token at whose positions "step" pools, unless a request names another one."""
    returned_token_ids: tuple[int, ...] = ()
    """The class scores that "step" returns. Empty for all."""
    task: PoolingTask | None = None
    """The task of requests that name none. None for the default task."""
    default_dimensions: int = 0
    """The length of an embedding, unless a request says otherwise; 0 for the length of the model's vectors."""
    max_seq_length: int = 0
    """The default of `max_model_len` in tokens; 0 for all positions of the model."""
    appends_eos: bool = False
    """Whether texts end with the EOS token."""
    pads_texts: bool = False
    """Whether texts are padded to the maximum length, with padding that other tokens attend to, as in training."""
    lowers_case: bool = False
    """Whether texts are lowercased before tokenization."""
    prompts: dict[str, str] = {}
    """Prefixes for texts, by the name of their purpose, such as "query"."""
    default_prompt: str | None = None
    """Name of the prefix that Sentence Transformers would use by default."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks that requests may select, the default first. A model trained for tokens has no result per
        prompt."""
        tasks = TASKS_OF[self.convert]
        if self.pooling in ("all", "step"):
            tasks = tuple(task for task in tasks if task in TOKEN_TASKS)
        return tuple(sorted(tasks, key=lambda task: task != self.task))
