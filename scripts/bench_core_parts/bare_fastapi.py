"""A bare FastAPI application on uvicorn, whose requests wait forever: `python bare_fastapi.py PORT`."""

import asyncio
import sys

import uvicorn
from fastapi import FastAPI, Request

app = FastAPI(telemetry={"tracing": False, "metrics": False, "logs": False})
num_waiting = 0


@app.get("/health")
async def health() -> int:
    """Return the number of waiting requests."""
    return num_waiting


@app.post("/v1/completions")
async def wait(request: Request) -> None:
    """Read the body and wait."""
    global num_waiting
    await request.body()
    num_waiting += 1
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvicorn.run(
        app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="critical", timeout_keep_alive=60
    )
