"""`LLMEngine`, which starts its own engine."""

from typing import Any

from octavo.compat.vllm.engine_steps import EngineSteps
from octavo.compat.vllm.llm import LLM


class LLMEngine(EngineSteps):
    """vLLM's class."""

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None, **options: Any) -> "LLMEngine":
        """Start an engine with the settings of `EngineArgs`; `usage_context` and other options are ignored."""
        del usage_context, options
        return cls(LLM.from_engine_args(engine_args))
