"""The heads of decoders that pool: layers that classes of `transformers` and reward models add to a decoder."""

import re
from collections.abc import Iterator

from torch import Tensor

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.pooling.heads import Dense, HeadLayer, PoolingHead

_KINDS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForProcessRewardModel",
    "ForRewardModel",
    "ForRetrieval",
    "BidirectionalModel",
    "Model",
)
_WIDTHS = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
_OTHER_HINT = "use a checkpoint that is not quantized"
_OTHER_NAMES = {"GPT2ForCausalLM": "GPT2LMHeadModel", "Gemma3TextForCausalLM": "Gemma3ForCausalLM"}


def decoder_of(architecture: str) -> str:
    """Return the decoder that an architecture adds a head to: "LlamaForCausalLM" for "LlamaForTokenClassification"."""
    kind = next((kind for kind in _KINDS if architecture.endswith(kind)), "")
    causal = f"{architecture.removesuffix(kind)}ForCausalLM" if kind else architecture
    return _OTHER_NAMES.get(causal, causal)


def decoder_head(parameters: Parameters, facts: ModelFacts) -> PoolingHead:
    """Make the head of a decoder that pools.

    Args:
        parameters: parameters of the decoder.
        facts: facts with the architecture of the checkpoint.

    Raises:
        ConfigError: the checkpoint has no such head, or one of another kind.
    """
    pooling = facts.pooling
    assert pooling is not None, "a decoder that pools"
    width = next(int(facts.hf_config[key]) for key in _WIDTHS if facts.hf_config.get(key))
    if facts.architecture.endswith("ForRetrieval"):
        num_outputs = required(facts.hf_config, "embedding_dim", int)
        return PoolingHead([Dense.new(parameters, "embedding_proj_layer", width, num_outputs, has_bias=True)])
    if pooling.convert == "embed":
        return PoolingHead(dense=pooling.dense)
    if pooling.score_token_ids:
        return PoolingHead([_token_scores(parameters, facts, width)])
    return PoolingHead(_classifier(parameters, facts.architecture, width, pooling.num_labels))


def _classifier(parameters: Parameters, architecture: str, width: int, num_labels: int) -> list[HeadLayer]:
    if re.search(r"InternLM2ForRewardModel$", architecture):
        return [Dense.new(parameters, "v_head", width, num_labels, has_bias=False)]
    if re.search(r"For(Process)?RewardModel$", architecture):
        first = Dense.new(parameters, "score.0", width, width, has_bias=True, activation="relu")
        return [first, Dense.new(parameters, "score.2", width, num_labels, has_bias=True)]
    if architecture.endswith("ForTokenClassification"):
        name = "classifier" if architecture.startswith(("GPT2", "GPTNeoX", "Bloom", "Falcon", "Mpt")) else "score"
        return [Dense.new(parameters, name, width, num_labels, has_bias=True)]
    if architecture.endswith("ForSequenceClassification"):
        return [Dense.new(parameters, "score", width, num_labels, has_bias=False)]
    raise ConfigError(
        f"{architecture} has no classification head",
        hint="use --convert embed, or --runner generate",
    )


def _token_scores(parameters: Parameters, facts: ModelFacts, width: int) -> Dense:
    """Make the head whose score is the logit of one token minus that of another: Qwen3-Reranker's yes and no.

    The sigmoid of the score is the probability of "yes" if these are the only two answers.
    """
    assert facts.pooling is not None, "a decoder that pools"
    first, second = facts.pooling.score_token_ids
    is_tied = optional(facts.hf_config, "tie_word_embeddings", False)
    table, part = "embed_tokens.weight" if is_tied else "lm_head.weight", "score_tokens.weight"
    head = Dense.new(parameters, part.removesuffix(".weight"), width, 1, has_bias=False)

    def split(name: str, table_VD: Tensor | QuantizedMatrix) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        if not isinstance(table_VD, Tensor):
            raise ConfigError(f"{name} is quantized: the scores of single tokens cannot be computed", hint=_OTHER_HINT)
        yield part, (table_VD[second].float() - table_VD[first].float())[None]
        if is_tied:
            yield name, table_VD

    parameters.names.add_split([table], split, [part] + [table] * is_tied)
    return head
