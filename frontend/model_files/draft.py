"""Checks that a draft model has the same tokens as the model that it drafts for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError


def check_draft_vocabulary(facts: ModelFacts, draft: ModelFacts) -> None:
    """Compare the vocabularies of two models, if both have a tokenizer.json.

    Added tokens, such as those of a chat template, may differ.

    Raises:
        ConfigError: a token has another id in the draft model.
    """
    if facts.tokenizer_path is None or facts.tokenizer_path == draft.model_path:
        return
    own, other = _read_vocabulary(facts.tokenizer_path), _read_vocabulary(draft.model_path)
    for token, token_id in own.items() if own and other else ():
        if (found := other.get(token)) != token_id:
            raise ConfigError(
                f"speculative_config: model: token {token!r} has id {token_id} in the model, and "
                f"{'none' if found is None else found} in the draft model {draft.model_path}",
                hint="name a smaller model of the same family, with the same tokenizer",
            )


def _read_vocabulary(home: str) -> Mapping[str, int]:
    """Return the ids of the tokens that are not added ones. `{}` if there is no tokenizer.json."""
    vocabulary: Any = read_json(Path(home) / "tokenizer.json").get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # tokens with scores
        return {token: token_id for token_id, (token, *_) in enumerate(vocabulary)}
    return dict(vocabulary)
