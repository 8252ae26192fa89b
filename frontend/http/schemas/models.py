"""`/v1/models`: the served models."""

from typing import Literal

from msgspec import Struct


class ModelPermission(Struct, kw_only=True):
    """A remnant of OpenAI's first API that some clients still read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """One model name that requests may use."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    """Base model of a LoRA adapter; null for a model."""
    max_model_len: int
    model_impl: str
    """Implementation of the model: "octavo" or "transformers"."""
    variant_module: str | None
    """The module that makes a request's bits depend on its batch; null if the bits do not depend on the batch."""
    permission: list[ModelPermission]


class ModelList(Struct, kw_only=True):
    """All model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
