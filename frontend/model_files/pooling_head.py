"""The classification head of a pooling model: labels, activation, or the tokens whose logits are the score."""

from collections.abc import Mapping
from typing import Any, cast

from octavo.protocol.config import ModelConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
"""Activations by the last part of their name in torch.nn."""


def named_activation(name: object, source: str) -> Activation:
    """Return an activation by its name in torch, such as "torch.nn.modules.activation.Tanh"."""
    short = str(name).rsplit(".", 1)[-1]
    if short not in _ACTIVATIONS:
        raise ConfigError(f"{source}: the activation {name} is not supported", hint=f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[short]


def activation_of(architecture: str, hf_config: Mapping[str, Any], num_labels: int) -> Activation:
    """Return the activation of class scores, chosen as in vLLM; an activation named by a file is used as it is."""
    usual: Activation = "softmax" if num_labels > 1 else "sigmoid"
    problem = hf_config.get("problem_type")
    if problem == "regression":
        return "identity"
    if problem in ("single_label_classification", "multi_label_classification"):
        return usual if problem == "single_label_classification" else "sigmoid"
    section = hf_config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, dict) else None
    if named := named or hf_config.get("sbert_ce_default_activation_function"):
        return named_activation(named, "config.json")
    # A reward is an unbounded number; a process reward model classifies steps as good or bad.
    if architecture.endswith("RewardModel") and not architecture.endswith("ForProcessRewardModel"):
        return "identity"
    return usual


def num_labels_of(architecture: str, hf_config: Mapping[str, Any]) -> int:
    """Return the number of classes, by default 2 as in transformers; for reward models it is fixed."""
    if architecture.endswith("RewardModel"):
        return 2 if architecture.endswith("ForProcessRewardModel") else 1
    labels = hf_config.get("num_labels") or len(hf_config.get("id2label") or ()) or 2
    if type(labels) is not int or labels < 1:
        raise ConfigError(f"config.json: num_labels must be a positive integer, not {labels!r}")
    return labels


def score_token_ids_of(config: ModelConfig, path: str | None, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens whose logits are compared, such as "no" and "yes" of Qwen3-Reranker; empty if it has a head.

    Raises:
        ConfigError: there are not two tokens, or one of them is not in the vocabulary.
    """
    from octavo.frontend.text.tokenizer import Tokenizer  # slow to import, and few models need it

    tokens = hf_config.get("classifier_from_token")
    if tokens is None and not hf_config.get("is_original_qwen3_reranker"):
        return ()
    method = hf_config.get("method", "from_2_way_softmax")
    if not isinstance(tokens, list) or len(tokens) != 2 or method != "from_2_way_softmax":
        raise ConfigError(
            f"classifier_from_token {tokens!r} with method {method!r} is not supported",
            hint="""for Qwen3-Reranker: --hf-overrides '{"architectures": ["Qwen3ForSequenceClassification"], """
            """"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}'""",
        )
    if path is None:
        raise ConfigError("classifier_from_token needs a tokenizer", hint="leave out --skip-tokenizer-init")
    tokenizer = Tokenizer.load(path, config.tokenizer_mode)
    ids = [tokenizer.token_id(str(token)) for token in tokens]
    if None in ids:
        raise ConfigError(f"classifier_from_token {tokens!r}: not all of them are tokens of the model")
    return tuple(cast(list[int], ids))
