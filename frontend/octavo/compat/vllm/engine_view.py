"""An engine's configuration under vLLM's names, and the configuration of the profiler."""

from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


@dataclass
class ProfilerConfig:
    """Where `start_profile` writes traces."""

    profiler: str | None = None
    """"torch"."""
    torch_profiler_dir: str = ""
    delay_iterations: int = 0
    """Ignored: traces begin with `start_profile`."""
    max_iterations: int = 0
    """Ignored: traces end with `stop_profile`."""


@dataclass
class PoolerConfig:
    """How a pooling model pools. `None`: as its files say."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in octavo's form: `None` members of configuration objects are left out.

    `max_model_len` in `hf_overrides` becomes the setting of that name; a model's `config.json` has no such key.
    """
    found = dict(settings)
    for name, value in settings.items():
        if is_dataclass(value) and not isinstance(value, type):
            found[name] = {member: one for member, one in vars(value).items() if one is not None}
    overrides = found.get("hf_overrides")
    if isinstance(overrides, dict) and "max_model_len" in overrides:
        found["hf_overrides"] = {name: value for name, value in overrides.items() if name != "max_model_len"}
        found.setdefault("max_model_len", overrides["max_model_len"])
    return found


class ModelConfig:
    """The model of an engine."""

    def __init__(self, client: "AsyncClient") -> None:
        own = client.config
        self.model = own.model.model_path
        self.tokenizer = own.model.tokenizer_path
        self.served_model_name = own.served_model_names[0]
        self.max_model_len = client.facts.max_model_len
        self.dtype = own.dtype
        self.seed = own.seed
        self.max_logprobs = own.max_logprobs
        self.architecture = own.model.architecture
        self._facts = own.model

    @cached_property
    def hf_config(self) -> Any:
        """The configuration as transformers loads it. For a GGUF file, it is made from the file's metadata."""
        import transformers

        config = dict(self._facts.hf_config)
        return transformers.AutoConfig.for_model(config.pop("model_type"), **config)

    def get_vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return self._facts.vocab_size


class VllmConfig:
    """The configuration of an engine: `model_config`, and octavo's own as `octavo_config`."""

    def __init__(self, client: "AsyncClient") -> None:
        self.model_config = ModelConfig(client)
        self.octavo_config = client.config


class EngineView:
    """The configuration attributes of vLLM's engine classes.

    Args:
        llm: this package's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's configuration under vLLM's names."""
        return VllmConfig(self._llm.client)

    @property
    def model_config(self) -> ModelConfig:
        """The model."""
        return self.vllm_config.model_config

    @property
    def tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()
