"""The HTTP server: OpenAI-compatible routes over an `AsyncClient`, for `octavo serve` and for FastAPI applications.

Its public names are imported lazily, because FastAPI takes a while to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.frontend.http.app import create_app as create_app
    from octavo.frontend.http.dependencies import get_client as get_client
    from octavo.frontend.http.router import create_router as create_router

_HOME = {
    "create_app": "octavo.frontend.http.app",
    "create_router": "octavo.frontend.http.router",
    "get_client": "octavo.frontend.http.dependencies",
}

__all__ = ["create_app", "create_router", "get_client"]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
