"""The routes of the dashboard, which are not in the OpenAPI schema."""

from fastapi import APIRouter

from octavo.frontend.dashboard.assets import asset, index
from octavo.frontend.dashboard.state import dashboard_state
from octavo.frontend.http.route import answer_failures


def add_dashboard_routes(router: APIRouter) -> None:
    """Add the page at `/` to a router whose route class is an `ApiRoute`."""
    for path, endpoint in (("/", index), ("/dashboard/state", dashboard_state), ("/dashboard/{name}", asset)):
        router.add_api_route(path, answer_failures(endpoint), response_model=None, include_in_schema=False)
