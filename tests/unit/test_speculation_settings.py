"""`--speculative-config` and its shorter flags."""

import pytest
from specs import some_facts

from octavo.protocol.config import EngineConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.config.speculation import ResolvedSpeculation, resolve_speculation
from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import PoolingFacts


def resolved(**settings) -> ResolvedSpeculation | None:
    return resolve_speculation(engine_config({"model": "M", **settings}).speculation, some_facts())


def test_settings_have_vllms_names() -> None:
    assert resolved() is None
    assert resolved(speculative_config={}) is None
    assert resolved(spec_method="ngram", spec_tokens=0) is None
    config = resolved(speculative_config='{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}')
    assert (config.method, config.max_depth, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 5, 4, 4)
    assert config.is_adaptive and not resolved(speculative_config={"method": "ngram", "adaptive": False}).is_adaptive
    assert resolved(spec_method="suffix", spec_tokens=7).max_depth == 7
    assert resolved(speculative_config={"method": "suffix"}).max_depth == 24
    assert resolved(speculative_config={"model": "ngram"}).method == "ngram"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec_method": "eagle3"}, "method eagle3 needs the model of a head"),
        ({"spec_method": "medusa"}, "method medusa: this release drafts by lookups, with draft models"),
        ({"spec_method": "mtp"}, "has no num_nextn_predict_layers"),
        ({"spec_method": "mtp", "spec_model": "org/head"}, "reads layers of the model itself"),
        ({"spec_method": "draft_model"}, "method draft_model needs a smaller model"),
        ({"spec_method": "magic"}, "there is no method 'magic'"),
        ({"spec_tokens": 3}, "no method is given"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 65}}, "<= 64"),
        ({"speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 1}}, "draft_tensor_parallel_size"),
        ({"speculative_config": {"method": "ngram", "model": "org/draft"}}, "reads no model"),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "suffix"}, "'ngram' in the JSON and 'suffix'"),
        ({"speculative_config": "[1]"}, "JSON object"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}}, "is above"),
    ],
)
def test_wrong_settings_are_rejected(settings, message) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**settings)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_a_model_that_pools_does_not_speculate() -> None:
    config: EngineConfig = engine_config({"model": "M", "spec_method": "ngram"})
    with pytest.raises(ConfigError, match="generates no tokens"):
        resolve_speculation(config.speculation, some_facts(pooling=PoolingFacts(convert="embed", pooling="last")))
