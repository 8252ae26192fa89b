"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: only with `--allow-runtime-lora-updating`."""

from starlette.responses import PlainTextResponse, Response

from octavo.frontend.http.body import decode
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.schemas.lora import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest


async def load_lora_adapter(state: CurrentState, http_request: ApiRequest) -> Response:
    """Load a LoRA adapter from a directory on this machine, for requests that name it as their model."""
    body = decode(http_request.take_body(), LoadLoRAAdapterRequest)
    await state.client.adapters.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(state: CurrentState, http_request: ApiRequest) -> Response:
    """Unload a LoRA adapter. In-flight requests finish with it."""
    body = decode(http_request.take_body(), UnloadLoRAAdapterRequest)
    state.client.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
