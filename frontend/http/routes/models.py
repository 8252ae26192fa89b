"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec
from starlette.responses import Response

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.models import ModelCard, ModelList, ModelPermission


async def list_models(state: CurrentState) -> Response:
    """List the served models and the LoRA adapters."""
    cards = [
        _card(one, name)
        for one in state.of_all_models
        for name in (*one.client.facts.served_model_names, *one.client.adapters.named)
    ]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type=JSON)


async def retrieve_model(state: CurrentState, request: ApiRequest) -> Response:
    """Describe one served model or adapter. Names may contain slashes."""
    name = request.path_params["model_id"]
    return Response(msgspec.json.encode(_card(await state.of_model(name), name)), media_type=JSON)


def _card(state: AppState, name: str) -> ModelCard:
    facts = state.client.facts
    found = None if name in facts.served_model_names else state.client.adapters.named.get(name)
    return ModelCard(
        id=name,
        created=state.created,
        root=found.adapter.path if found else state.client.config.model_name or facts.model,
        parent=(found.parent or facts.served_model_names[0]) if found else None,
        max_model_len=facts.max_model_len,
        model_impl=facts.model_impl,
        variant_module=facts.variant_module or None,
        permission=[ModelPermission(id=f"modelperm-{name}", created=state.created)],
    )
