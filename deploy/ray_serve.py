"""octavo under Ray Serve: the routes of `octavo serve`, in replicas that Ray Serve starts, scales and updates.

    serve run ray_serve:build model=MODEL num_threads=4

Each replica owns an engine. Ray Serve chooses a replica by queue lengths and knows nothing of what an engine has
cached. If that matters more than scaling, use `octavo serve --data-parallel-backend ray` instead: it routes by prefix,
and the other engines continue the requests of one that dies.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import yaml
from fastapi import FastAPI
from ray import serve

from octavo import AsyncClient, create_app


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application.

    Args:
        arguments: flags of the engine by their names, as text or YAML values; num_replicas, num_cpus and num_gpus of
            the deployment.
    """
    settings = {name: yaml.safe_load(str(value)) for name, value in arguments.items()}
    num_replicas = settings.pop("num_replicas", 1)
    resources = {"num_cpus": settings.pop("num_cpus", 1), "num_gpus": settings.pop("num_gpus", 0)}

    def make_app() -> FastAPI:
        """Called in each replica."""

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with AsyncClient.launch(**settings) as client:
                app.mount("/", create_app(client))
                yield

        return FastAPI(lifespan=lifespan)

    replica = serve.deployment(
        serve.ingress(make_app)(),
        name="octavo",
        num_replicas=num_replicas,
        ray_actor_options=resources,
        max_ongoing_requests=1024,  # the engine has queues of its own
        graceful_shutdown_timeout_s=60.0,
    )
    return replica.bind()
