"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec

from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.schemas.models import ModelCard, ModelList, ModelPermission
from octavo.frontend.http.serving import Serving


async def list_models(serving: Serving, request: Request) -> Response:
    """Say which names are served."""
    cards = [_card(serving, name) for name in serving.client.facts.served_model_names]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type=JSON)


async def retrieve_model(serving: Serving, request: Request) -> Response:
    """Describe one served name; names may hold slashes."""
    name = serving.model_name(request.variables["model_id"])
    return Response(msgspec.json.encode(_card(serving, name)), media_type=JSON)


def _card(serving: Serving, name: str) -> ModelCard:
    facts = serving.client.facts
    return ModelCard(
        id=name,
        created=serving.created,
        root=facts.model,
        max_model_len=facts.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=serving.created)],
    )
