"""The page's entries in the route table. They are not part of the described API."""

from octavo.frontend.dashboard.assets import asset, index
from octavo.frontend.dashboard.state import dashboard_state
from octavo.frontend.http.route import Route

DASHBOARD_ROUTES: tuple[Route, ...] = (
    Route("GET", "/", index),
    Route("GET", "/dashboard/state", dashboard_state),
    Route("GET", "/dashboard/{name}", asset),
)
