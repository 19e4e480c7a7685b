"""Real vLLM servers behind a router, and what their answers and caches are held to."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.common import free_port, launched
from benchmarks.vllm import CONNECTOR, vllm_command, vllm_environment
from tandem.cluster.engines.process import pin
from tandem.cluster.model_store import resolve_model, served_name
from tandem.runtime.ports import free_ports
from tests.support.waiting import until

STORY = "Here is what happened on day {}: the boat went out, the wind turned, and nobody on the pier saw it. "
_HOST = "127.0.0.1"
_KV_BYTES_PER_TOKEN = 23_040  # of SmolLM2-135M in bfloat16


@dataclass(frozen=True)
class Fleet:
    """vLLM servers and the router in front of them."""

    model: str
    router_url: str
    router_pid: int
    urls: dict[str, str]
    pids: dict[str, int]
    api_key: str = ""  # of the servers, not of the router

    @property
    def headers(self) -> dict[str, str]:
        """Of requests to the servers themselves."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@contextlib.contextmanager
def routed(
    settings: argparse.Namespace,
    names: tuple[str, ...],
    *,
    is_pair: bool = False,
    flags: Sequence[str] = (),
    num_ranks: int = 1,
    more_env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Fleet]:
    """vLLM servers of these names on equal parts of the cores, and a ready `tandem route` in front of them.

    Each server has `num_ranks` data-parallel ranks, and gets `flags` and the environment `more_env` too.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(names))
    model = served_name(settings.model)
    urls, pids, tables = {}, {}, []
    with contextlib.ExitStack() as stack:
        for i, name in enumerate(names):
            part = cores[i * share : (i + 1) * share] or cores[-1:]
            port = free_port()
            events, replay = free_ports(_HOST, num_ranks), free_ports(_HOST, num_ranks)
            urls[name] = f"http://127.0.0.1:{port}"
            publisher = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            command = [*vllm_command(settings, port), "--enforce-eager", "--enable-prompt-tokens-details", *flags]
            command += ["--data-parallel-size", str(num_ranks)] if num_ranks > 1 else []
            command += ["--kv-events-config", json.dumps(publisher)]
            command += ["--kv-transfer-config", json.dumps(CONNECTOR)] if is_pair else []
            env = vllm_environment(part) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(_HOST, num_ranks))}
            if num_ranks > 1:
                env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(part[rank % len(part)]) for rank in range(num_ranks))
            running = stack.enter_context(launched(command, ready=f"{urls[name]}/health", env={**env, **more_env}))
            pids[name] = running.process.pid
            pin(running.process.pid, part)
            role = ("prefill", "decode")[i] if is_pair else "both"
            tables.append(_table(name, urls[name], model, role, events, replay, num_ranks))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder, "engines.toml")
        path.write_text(f'[tokenizers]\n"{model}" = "{resolve_model(settings.model)}"\n' + "".join(tables))
        port = free_port()
        command = [sys.executable, "-m", "tandem", "route", f"--engines={path}", f"--port={port}"]
        command += ["--routing=cost,pairs"] if is_pair else []
        url = f"http://127.0.0.1:{port}"
        router = stack.enter_context(launched(command, ready=f"{url}/ready"))
        _wait_for_all(url, len(names) * num_ranks)
        yield Fleet(model, url, router.process.pid, urls, pids)


def _table(name: str, url: str, model: str, role: str, events: int, replay: int, num_ranks: int) -> str:
    values = {
        "name": name,
        "url": url,
        "model": model,
        "kind": "vllm",
        "role": role,
        "hardware": "cpu",
        "kv_bytes_per_token": _KV_BYTES_PER_TOKEN,
        "kv_events": f"tcp://127.0.0.1:{events}",
        "kv_replay": f"tcp://127.0.0.1:{replay}",
        "data_parallel_size": num_ranks,
    }
    return "[[engines]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _wait_for_all(url: str, count: int) -> None:
    def states() -> list[str]:
        engines = httpx.get(f"{url}/v1/pools", trust_env=False, timeout=5.0).json()["engines"]
        return [engine["state"] for engine in engines]

    until(lambda: states().count("ready") == count, explain=lambda: f"engines: {states()}")


def measure_answers(fleet: Fleet) -> dict[str, Any]:
    """Compare greedy answers through the router, plain and streamed, with those of a vLLM server asked directly."""
    direct = next(reversed(fleet.urls.values()))  # in a pair this is the decode engine, which can answer alone
    num_equal, different = 0, []
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        for path, body in _requests(fleet.model):
            expected = _text(client.post(direct + path, json=body, headers=fleet.headers).raise_for_status().json())
            plain = _text(client.post(fleet.router_url + path, json=body).raise_for_status().json())
            streamed = client.post(fleet.router_url + path, json=body | {"stream": True}).raise_for_status().text
            for way, text in (("plain", plain), ("streamed", _streamed_text(streamed))):
                num_equal += text == expected
                if text != expected:
                    different.append({"path": path, "way": way, "expected": expected, "got": text})
    return {"num_equal": num_equal, "num_compared": num_equal + len(different), "different": different}


def _requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    common = {"model": model, "max_tokens": 32, "temperature": 0}
    texts = ["The capital of France is", "Once upon a time", "".join(STORY.format(i) for i in range(12))]
    found: list[tuple[str, dict[str, Any]]] = [("/v1/completions", common | {"prompt": text}) for text in texts]
    found.append(("/v1/completions", common | {"prompt": list(range(1000, 1300))}))
    for text in texts:
        found.append(("/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}))
    return found


def measure_turns(fleet: Fleet, *, num_chats: int, num_turns: int) -> list[dict[str, Any]]:
    """Chats that grow by their answers: tokens found cached in each turn, and those the router's index expected."""
    turns = []
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        messages: list[list[dict[str, str]]] = [[] for _ in range(num_chats)]
        for turn, chat in itertools.product(range(num_turns), range(num_chats)):
            question = "".join(STORY.format(f"{chat}-{turn}-{i}") for i in range(8)) + "What came next?"
            messages[chat].append({"role": "user", "content": question})
            body = {"model": fleet.model, "messages": messages[chat], "max_tokens": 48, "temperature": 0}
            response = client.post(f"{fleet.router_url}/v1/chat/completions", json=body).raise_for_status()
            answer = response.json()
            messages[chat].append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            turns.append(
                {
                    "turn": turn + 1,
                    "chat": chat,
                    "engine": response.headers["x-tandem-engine"],
                    "prompt_tokens": usage["prompt_tokens"],
                    "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
                    "expected_tokens": int(response.headers["x-tandem-expected-cached-tokens"]),
                }
            )
    return turns


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _streamed_text(stream: str) -> str:
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)
