"""A server that is started like SGLang's and answers words: an engine for tests of managed engines.

It keeps SGLang's rules: the key comes from its `--config` file, a server with a mode answers only requests that name a
room, a decode server answers only after a prefill server has the same room, and only an idle server switches its role.
`managed.engine_python` makes the "Python" that runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

NO_TRANSFER = "2.2.2.2"  # the host of requests that hand nothing over
MEETING_TIMEOUT_S = 10.0


class FakeSglang:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.model: str = settings.served_model_name
        self.mode: str = settings.disaggregation_mode
        self.can_switch: bool = settings.enable_pd_role_switch
        self.key = re.fullmatch(r'api-key: "(\w+)"\n', Path(settings.config).read_text())[1]  # type: ignore[index]
        self.rooms: dict[int, asyncio.Event] = {}
        self.num_running = 0

    def room(self, number: int) -> asyncio.Event:
        return self.rooms.setdefault(number, asyncio.Event())

    async def meet(self, body: dict[str, Any]) -> str:
        """Do this server's half of a handover; what is wrong with the request, "" if nothing is."""
        if self.mode == "null":
            return ""
        if body.get("bootstrap_room") is None:
            return "Disaggregated request received without bootstrap room id."
        if body["bootstrap_host"] == NO_TRANSFER:
            return ""
        if self.mode == "prefill":
            self.room(body["bootstrap_room"]).set()
            return ""
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/rooms/{body['bootstrap_room']}"
        async with httpx.AsyncClient(trust_env=False, timeout=MEETING_TIMEOUT_S) as client:
            answer = await client.get(url)
        return "" if answer.status_code == 200 else "the prefill server does not know the room"

    def switch(self, role: str) -> tuple[bool, str]:
        if not self.can_switch:
            return False, "--enable-pd-role-switch is not set on this server"
        if self.num_running:
            return False, "instance is not idle; drain all requests before switching"
        self.mode = role
        return True, "ok"


def app_of(fake: FakeSglang) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        lines = [f"sglang:num_running_reqs {fake.num_running}", "sglang:num_queue_reqs 0", "sglang:token_usage 0.0"]
        return Response("\n".join([*lines, "sglang:page_size 16", "sglang:num_pages 512", ""]))

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": fake.model, "max_model_len": 4096, "parent": None}]}

    @app.get("/server_info")
    async def server_info() -> Any:
        return {"internal_states": [{"decode_cuda_graph_memory_gb": 0.5, "decode_cuda_graph_bs": [1, 2]}]}

    @app.post("/pd_role_switch")
    async def pd_role_switch(request: Request) -> Response:
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {fake.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if body["new_role"] == "decode" and body["decode_cuda_graph_memory_gb"] != 0.5:
            return JSONResponse({"success": False, "message": "no size of graphs", "safe_to_restore": True}, 400)
        success, message = fake.switch(body["new_role"])
        content = {"success": success, "message": message, "safe_to_restore": not success}
        return JSONResponse(content, 200 if success else 400)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {fake.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        body = await request.json()
        fake.num_running += 1
        try:
            problem = await fake.meet(body)
        finally:
            fake.num_running -= 1
        if problem:
            return JSONResponse({"object": "error", "message": problem, "code": 400}, 400)
        if body.get("stream"):
            return StreamingResponse(stream_of(body), media_type="text/event-stream")
        return JSONResponse(chunk(fake.mode + " " * (fake.mode != "null") + "word " * body["max_tokens"]) | usage(body))

    return app


def rooms_of(fake: FakeSglang) -> FastAPI:
    """The bootstrap server of a prefill server: tells a decode server when the room is entered."""
    app = FastAPI()

    @app.get("/rooms/{number}")
    async def room(number: int) -> Response:
        try:
            await asyncio.wait_for(fake.room(number).wait(), MEETING_TIMEOUT_S)
        except TimeoutError:
            return Response(status_code=404)
        return Response()

    return app


def chunk(text: str) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None}]}


def usage(body: dict[str, Any]) -> dict[str, Any]:
    count = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
    return {"usage": count | {"prompt_tokens_details": {"cached_tokens": 0}}}


async def stream_of(body: dict[str, Any]) -> AsyncIterator[str]:
    for _ in range(body["max_tokens"]):
        yield f"data: {json.dumps(chunk('word '))}\n\n"
    yield f"data: {json.dumps({'id': 'c', 'choices': []} | usage(body))}\n\n"
    yield "data: [DONE]\n\n"


async def serve(fake: FakeSglang, port: int, bootstrap_port: int | None) -> None:
    apps = [(app_of(fake), port)] + ([(rooms_of(fake), bootstrap_port)] if bootstrap_port else [])
    servers = [
        uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=at, log_level="critical", lifespan="off"))
        for app, at in apps
    ]
    print(f"serving {fake.model} in mode {fake.mode}", flush=True)
    await asyncio.gather(*(server.serve() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    parser.add_argument("--enable-pd-role-switch", action="store_true")
    parser.add_argument("--fake-error", help="write this while it starts, and end by force as SGLang does")
    settings, _ = parser.parse_known_args()
    if settings.fake_error:
        print(settings.fake_error, "kill_process_tree called", sep="\n", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(serve(FakeSglang(settings), settings.port, settings.disaggregation_bootstrap_port))


if __name__ == "__main__":
    main()
