"""FastAPI dependencies of the routes. An application that embeds them may override `get_client`."""

from typing import Annotated, TypeAlias

from fastapi import Depends
from starlette.requests import Request

from octavo.frontend.client import AsyncClient
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.route import APP_STATE


async def get_client(request: Request) -> AsyncClient:
    """Return the engine's client that the router was created with.

    Use it in a route of your own to generate text. Override it (`app.dependency_overrides`) to choose the engine per
    request.
    """
    state = request.scope[APP_STATE]
    assert isinstance(state, AppState)
    return state.client


async def get_app_state(request: Request, client: Annotated[AsyncClient, Depends(get_client)]) -> AppState:
    """Return the state of the routes for this client."""
    state = request.scope[APP_STATE]
    assert isinstance(state, AppState)
    return state.with_client(client)


CurrentState: TypeAlias = Annotated[AppState, Depends(get_app_state)]
