"""octavo: a serving engine for large language models.

This façade loads nothing until a name is asked for (PEP 562), so that `import octavo.core_proc`
loads neither the frontend nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient as AsyncClient
    from octavo.frontend.llm import LLM as LLM
    from octavo.frontend.outputs import CompletionOutput as CompletionOutput
    from octavo.frontend.outputs import RequestOutput as RequestOutput
    from octavo.protocol.params import BeamSearchParams as BeamSearchParams
    from octavo.protocol.params import SamplingParams as SamplingParams
    from octavo.protocol.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from octavo.protocol.structured import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "octavo.frontend.client",
    "BeamSearchParams": "octavo.protocol.params",
    "CompletionOutput": "octavo.frontend.outputs",
    "LLM": "octavo.frontend.llm",
    "RepetitionDetectionParams": "octavo.protocol.repetition",
    "RequestOutput": "octavo.frontend.outputs",
    "SamplingParams": "octavo.protocol.params",
    "StructuredOutputsParams": "octavo.protocol.structured",
}

__all__ = [
    "AsyncClient",
    "BeamSearchParams",
    "CompletionOutput",
    "LLM",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home the first time it is used."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
