"""A pooler on an engine that pools without a model."""

from typing import Any

from fake_client import byte_tokenizer, engine_facts, resolved_config
from pooling_link import WIDTH, PoolingLink, pooler_on

from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.pooling import PoolingFacts

EMBED = PoolingFacts(convert="embed", pooling="last", normalize=False)


class FakePooling:
    """A pooler on a fake link."""

    def __init__(self, facts: PoolingFacts | None = EMBED, tokenizer: Tokenizer | None = None, **settings: Any) -> None:
        self.link = PoolingLink(engine_facts(["org/fake"]))
        self.live = LiveRequests()
        self.config = pooling_config(facts, **settings)
        self.pooler = pooler_on(self.link, self.config, tokenizer or byte_tokenizer(), self.live)


def pooling_config(facts: PoolingFacts | None, **settings: Any) -> ResolvedConfig:
    """Return the configuration of an engine that pools vectors of length `WIDTH`, or generates (`None`)."""
    return resolved_config(pooling=facts, hf_config={"hidden_size": WIDTH}, **settings)
