"""Asks an SGLang server to take its other role, which it does only while it is idle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import Role
from tandem.router.engines.config import EngineSpec

_SWITCH_TIMEOUT_S = 120.0  # it may capture CUDA graphs
_IDLE_TIMEOUT_S = 10.0  # for what the server still does after our requests have ended
_AGAIN_S = 0.2


class RoleIsLost(WorkerError):
    """The server has neither its old role nor its new one: it must be started again."""


async def switch_role(server: EngineSpec, role: Role, peer: EngineSpec | None) -> None:
    """Give an idle server this role. `peer` is one that decodes: it knows how much memory its CUDA graphs take.

    Raises `WorkerError` if the server refuses and keeps its role, and `RoleIsLost`.
    """
    async with httpx.AsyncClient(timeout=_SWITCH_TIMEOUT_S, trust_env=False) as client:
        body = {"new_role": role.value} | (await _graphs(client, peer) if role is Role.DECODE else {})
        deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
        while True:
            answer = await _ask(client, server, body)
            if answer.get("success") is True:
                return
            reason = str(answer.get("message") or answer)[:300]
            if answer.get("safe_to_restore") is not True:
                raise RoleIsLost(f"{server.name} failed to become a {role} server: {reason}")
            if "not idle" not in reason or time.monotonic() > deadline_s:
                raise WorkerError(f"{server.name} refused to become a {role} server: {reason}")
            await asyncio.sleep(_AGAIN_S)


async def _ask(client: httpx.AsyncClient, server: EngineSpec, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await client.post(f"{server.url}/pd_role_switch", json=body, headers=server.request_headers())
        content = answer.json()
    except (httpx.HTTPError, ValueError) as exc:  # whether it switches is not known
        raise RoleIsLost(f"{server.name} did not say whether it switched: {exc or type(exc).__name__}") from exc
    if answer.status_code in (401, 403, 404) or not isinstance(content, dict):
        raise WorkerError(f"{server.name} cannot switch roles: it answered {answer.status_code} {answer.text[:200]}")
    return content


async def _graphs(client: httpx.AsyncClient, peer: EngineSpec | None) -> dict[str, Any]:
    """The fields that a server needs to capture the graphs of decoding; without a peer it is told to expect none."""
    state: dict[str, Any] = {}
    if peer is not None:
        try:
            answer = await client.get(f"{peer.url}/server_info", headers=peer.request_headers())
            [state, *_] = answer.json()["internal_states"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            raise WorkerError(
                f"{peer.name} did not report the size of its CUDA graphs: {exc or type(exc).__name__}"
            ) from exc
    return {
        "decode_cuda_graph_memory_gb": state.get("decode_cuda_graph_memory_gb") or 0.0,
        "decode_cuda_graph_bs": state.get("decode_cuda_graph_bs") or None,
    }
