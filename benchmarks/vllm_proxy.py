"""The smallest proxy that vLLM's 1P1D needs: prefill on one server, then stream from the other.

python -m benchmarks.vllm_proxy PREFILL_URL DECODE_URL PORT

The servers' key, if they have one, is in VLLM_API_KEY.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def create_app(prefill_url: str, decode_url: str) -> FastAPI:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    key = os.environ.get("VLLM_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    prefill, decode = (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=300.0, limits=limits, trust_env=False)
        for url in (prefill_url, decode_url)
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await prefill.aclose()
        await decode.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Any:
        return (await decode.get("/v1/models")).json()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        return (await decode.post("/tokenize", content=await request.body(), headers=_json())).json()

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        body, path, headers = await request.json(), request.url.path, _json()
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        first.pop("stream_options", None)
        answer = await prefill.post(path, json=first, headers=headers)
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type="application/json")
        rest = body | {"kv_transfer_params": answer.json().get("kv_transfer_params")}
        upstream = decode.build_request("POST", path, json=rest, headers=headers)
        response = await decode.send(upstream, stream=True)
        return StreamingResponse(_relay(response), response.status_code, media_type=response.headers["content-type"])

    return app


async def _relay(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


def _json() -> dict[str, str]:
    """One id for both halves of a request, so that the servers' logs can be matched."""
    return {"content-type": "application/json", "x-request-id": str(uuid.uuid4())}


if __name__ == "__main__":
    prefill_url, decode_url, port = sys.argv[1:]
    uvicorn.run(create_app(prefill_url, decode_url), host="127.0.0.1", port=int(port), log_level="warning")
