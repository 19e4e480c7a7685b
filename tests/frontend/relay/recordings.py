"""Answers of vLLM 0.32 with SmolLM2, recorded, and a way to have a fake engine replay them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response

from tests.support.fake_openai import FakeServer

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded/vllm_0.32.json").read_text())
MODEL = "SmolLM2-135M-Instruct"
KV = {"do_remote_prefill": True, "remote_engine_id": "e_dp1", "remote_block_ids": [[1, 2]], "remote_port": 5601}


def replay(fake: FakeServer, name: str) -> dict[str, Any]:
    """Have the fake answer as recorded, and as a prefill engine say where the KV is. Returns the request's body."""
    recorded = RECORDED[name]
    fake.model = MODEL
    fake.replies[recorded["path"]] = _reply(recorded)
    return dict(recorded["body"])


def _reply(recorded: dict[str, Any]) -> Callable[[str, dict[str, Any]], Response]:
    def reply(_: str, body: dict[str, Any]) -> Response:
        if body.get("stream"):
            return Response(recorded["stream"], media_type="text/event-stream")
        wants_kv = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        return JSONResponse(recorded["answer"] | ({"kv_transfer_params": KV} if wants_kv else {}))

    return reply
