"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from typing import Annotated

from msgspec import Meta, Struct


class LoadLoRAAdapterRequest(Struct, kw_only=True):
    """An adapter to load."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    """Directory on the server's machine, or a hub id."""
    load_inplace: bool = False
    """Replace a loaded adapter with this name. In-flight requests finish with the old adapter."""
    is_3d_lora_weight: bool = False
    """Ignored: the names of the tensors tell whether the weights of experts are stacked."""


class UnloadLoRAAdapterRequest(Struct, kw_only=True):
    """An adapter to unload."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_int_id: int | None = None
    """Ignored: names are unique."""
