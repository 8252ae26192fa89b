"""octavo: a serving engine for large language models.

This package loads nothing until a name is used (PEP 562), so that `import octavo.core_proc` loads neither the frontend
nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient as AsyncClient
    from octavo.frontend.http.app import create_app as create_app
    from octavo.frontend.http.dependencies import get_client as get_client
    from octavo.frontend.http.router import create_router as create_router
    from octavo.frontend.llm import LLM as LLM
    from octavo.frontend.lora.request import LoRARequest as LoRARequest
    from octavo.frontend.outputs import CompletionOutput as CompletionOutput
    from octavo.frontend.outputs import RequestOutput as RequestOutput
    from octavo.frontend.pooling.outputs import ClassificationOutput as ClassificationOutput
    from octavo.frontend.pooling.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from octavo.frontend.pooling.outputs import EmbeddingOutput as EmbeddingOutput
    from octavo.frontend.pooling.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from octavo.frontend.pooling.outputs import PoolingOutput as PoolingOutput
    from octavo.frontend.pooling.outputs import PoolingRequestOutput as PoolingRequestOutput
    from octavo.frontend.pooling.outputs import ScoringOutput as ScoringOutput
    from octavo.frontend.pooling.outputs import ScoringRequestOutput as ScoringRequestOutput
    from octavo.protocol.config import ServerConfig as ServerConfig
    from octavo.protocol.kv_connector import ConnectorRequest as ConnectorRequest
    from octavo.protocol.kv_connector import KVConnectorBase as KVConnectorBase
    from octavo.protocol.kv_connector import KVConnectorConfig as KVConnectorConfig
    from octavo.protocol.kv_connector import KVConnectorRole as KVConnectorRole
    from octavo.protocol.logits_processor import AdapterLogitsProcessor as AdapterLogitsProcessor
    from octavo.protocol.logits_processor import BatchUpdate as BatchUpdate
    from octavo.protocol.logits_processor import LogitsProcessor as LogitsProcessor
    from octavo.protocol.logits_processor import MoveDirectionality as MoveDirectionality
    from octavo.protocol.params import BeamSearchParams as BeamSearchParams
    from octavo.protocol.params import SamplingParams as SamplingParams
    from octavo.protocol.pooling_params import PoolingParams as PoolingParams
    from octavo.protocol.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from octavo.protocol.structured import StructuredOutputsParams as StructuredOutputsParams
    from octavo.protocol.version import __version__ as __version__

_HOME = {
    "AdapterLogitsProcessor": "octavo.protocol.logits_processor",
    "AsyncClient": "octavo.frontend.client",
    "BatchUpdate": "octavo.protocol.logits_processor",
    "BeamSearchParams": "octavo.protocol.params",
    "ClassificationOutput": "octavo.frontend.pooling.outputs",
    "ClassificationRequestOutput": "octavo.frontend.pooling.outputs",
    "CompletionOutput": "octavo.frontend.outputs",
    "ConnectorRequest": "octavo.protocol.kv_connector",
    "EmbeddingOutput": "octavo.frontend.pooling.outputs",
    "EmbeddingRequestOutput": "octavo.frontend.pooling.outputs",
    "KVConnectorBase": "octavo.protocol.kv_connector",
    "KVConnectorConfig": "octavo.protocol.kv_connector",
    "KVConnectorRole": "octavo.protocol.kv_connector",
    "LLM": "octavo.frontend.llm",
    "LoRARequest": "octavo.frontend.lora.request",
    "LogitsProcessor": "octavo.protocol.logits_processor",
    "MoveDirectionality": "octavo.protocol.logits_processor",
    "PoolingOutput": "octavo.frontend.pooling.outputs",
    "PoolingParams": "octavo.protocol.pooling_params",
    "PoolingRequestOutput": "octavo.frontend.pooling.outputs",
    "RepetitionDetectionParams": "octavo.protocol.repetition",
    "RequestOutput": "octavo.frontend.outputs",
    "SamplingParams": "octavo.protocol.params",
    "ScoringOutput": "octavo.frontend.pooling.outputs",
    "ScoringRequestOutput": "octavo.frontend.pooling.outputs",
    "ServerConfig": "octavo.protocol.config",
    "StructuredOutputsParams": "octavo.protocol.structured",
    "__version__": "octavo.protocol.version",
    "create_app": "octavo.frontend.http.app",
    "create_router": "octavo.frontend.http.router",
    "get_client": "octavo.frontend.http.dependencies",
}

__all__ = [
    "AdapterLogitsProcessor",
    "AsyncClient",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConnectorRequest",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "KVConnectorBase",
    "KVConnectorConfig",
    "KVConnectorRole",
    "LLM",
    "LoRARequest",
    "LogitsProcessor",
    "MoveDirectionality",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServerConfig",
    "StructuredOutputsParams",
    "__version__",
    "create_app",
    "create_router",
    "get_client",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
