"""Pooling: vectors, classes and scores of prompts, instead of tokens. What a model can compute of them.

What one request asks for is `params.PoolingSpec`; what comes back is `events.PooledOutput`.
"""

from typing import Literal, TypeAlias, get_args

from msgspec import Struct

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]
"""What a request asks for: one vector or one list of class scores for its prompt, or one for each of its tokens."""

PoolingType: TypeAlias = Literal["cls", "last", "mean", "all", "step"]
"""Which tokens make the result: the first one, the last one, the mean of all; each for itself ("all"), or each that is
the step tag ("step")."""

Conversion: TypeAlias = Literal["embed", "classify"]
Activation: TypeAlias = Literal["identity", "tanh", "gelu", "relu", "sigmoid", "softmax"]

POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})
TASKS_OF: dict[Conversion, tuple[PoolingTask, ...]] = {
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "token_classify"),
}
"""The tasks of a model, the usual one first."""


class DenseLayer(Struct, frozen=True, kw_only=True):
    """A layer that Sentence Transformers applies to a pooled vector: `2_Dense` and the like."""

    path: str
    """Its folder, which has its weights: linear.weight and linear.bias."""
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: Activation


class PoolingFacts(Struct, frozen=True, kw_only=True):
    """How a model turns hidden states into vectors or scores, from its files and `--pooler-config`."""

    convert: Conversion
    """"embed": its hidden states are the result; "classify": a classification head computes it from them."""
    pooling: PoolingType
    """Of the tasks that have one result for a prompt; "all", "step": there is none, only those for each token."""
    token_pooling: PoolingType = "all"
    """Of the tasks that have one for each token: "all" or "step"."""
    is_causal: bool = True
    """False: a token attends to those after it too. Prompts are then computed whole, and nothing is shared between
    them."""
    normalize: bool = True
    """Embeddings have length 1, unless a request says otherwise."""
    activation: Activation = "identity"
    """Of class scores, unless a request says otherwise."""
    num_labels: int = 0
    """Classes; 0: the model has no classification head."""
    num_segments: int = 1
    """Kinds of token (BERT's token types) that the model tells apart: 2: those of a second text in a pair."""
    score_token_ids: tuple[int, ...] = ()
    """Two tokens, such as "no" and "yes": the logit of the second one minus that of the first is the only class score.
    (): there is a head of its own."""
    dense: tuple[DenseLayer, ...] = ()
    """Applied to pooled vectors, in order, before they are normalized."""
    dimensions: tuple[int, ...] | None = None
    """The lengths to which a vector may be cut (Matryoshka); (): any length; None: it cannot be cut."""
    step_tag_id: int | None = None
    """The token whose positions "step" takes, unless a request names another one."""
    returned_token_ids: tuple[int, ...] = ()
    """The class scores that "step" returns; (): all."""
    task: PoolingTask | None = None
    """What requests get that do not name a task; None: the usual one."""
    default_dimensions: int = 0
    """The length of an embedding, unless a request says otherwise; 0: that of the model's vectors."""
    max_seq_length: int = 0
    """The default of `max_model_len`, in tokens; 0: all positions of the model."""
    appends_eos: bool = False
    """Texts end with the EOS token."""
    pads_texts: bool = False
    """Texts are filled up to the longest one that the model reads with padding, which other tokens attend to: the
    model was trained so."""
    lowers_case: bool = False
    """Texts are tokenized in lower case."""
    prompts: dict[str, str] = {}
    """What is put before a text, by the name of its purpose, such as "query"."""
    default_prompt: str | None = None
    """The name that Sentence Transformers would take if none is given."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What requests may ask for, the usual task first. A model trained for tokens has no result for a prompt."""
        tasks = TASKS_OF[self.convert]
        if self.pooling in ("all", "step"):
            tasks = tuple(task for task in tasks if task in TOKEN_TASKS)
        return tuple(sorted(tasks, key=lambda task: task != self.task))
