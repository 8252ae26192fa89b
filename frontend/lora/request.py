"""`LoRARequest`: the adapter of a request in the Python API."""

import msgspec

from octavo.protocol.errors import InvalidRequestError


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, with the fields of vLLM's class of the same name.

    Raises:
        InvalidRequestError: a field is missing or invalid.
    """

    lora_name: str
    lora_int_id: int
    """Positive id of the adapter within a client: the files are read once per id."""
    lora_path: str = ""
    """Directory written by peft's `save_pretrained`, or a hub id: `org/name` or `org/name@revision`."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Read the files again, and replace the adapter of this name and id. Requests in flight keep the old adapter."""
    is_3d_lora_weight: bool = False
    """Ignored: the names of the tensors tell whether the weights of experts are stacked."""

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`, as in vLLM."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`, as in vLLM."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`, as in vLLM."""
        return self.lora_path

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise InvalidRequestError(f"{name} must be text that is not empty, got {value!r}", name)
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequestError(f"lora_int_id must be an integer above 0, got {number!r}", "lora_int_id")
