"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.http.schemas.models import ModelCard, ModelList, ModelPermission
from octavo.frontend.http.serving import Serving, serving_of


async def list_models(request: Request) -> Response:
    """Say which names are served."""
    serving = serving_of(request)
    cards = [_card(serving, name) for name in serving.client.facts.served_model_names]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    """Describe one served name; names may hold slashes."""
    serving = serving_of(request)
    name = serving.model_name(request.path_params["model_id"])
    return Response(msgspec.json.encode(_card(serving, name)), media_type="application/json")


def _card(serving: Serving, name: str) -> ModelCard:
    facts = serving.client.facts
    return ModelCard(
        id=name,
        created=serving.created,
        root=facts.model,
        max_model_len=facts.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=serving.created)],
    )
