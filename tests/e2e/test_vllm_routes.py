"""What passes through `tandem route` to a real vLLM. Set TANDEM_VLLM_PYTHON to the Python of an environment with vLLM.

A pair's answers are compared with those of its decode engine asked alone; adapters and data-parallel ranks are real.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.cluster.model_store import resolve_model
from tandem.protocol.config import DEFAULT_MODEL
from tests.support.vllm_servers import Fleet, routed

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
SETTINGS = argparse.Namespace(vllm_python=VLLM_PYTHON, model=DEFAULT_MODEL)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set"),
]

Json = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
CHAT_TOOL, RESPONSE_TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
MESSAGE_TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
STORY = "The boat went out, the wind turned, and nobody on the pier saw it. " * 8
MESSAGES = [{"role": "system", "content": STORY}, {"role": "user", "content": "What is the weather in Paris?"}]
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def chat(**fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0} | fields


def complete(**fields: Any) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": STORY, "max_tokens": 8, "temperature": 0} | fields


def respond(**fields: Any) -> tuple[str, Json]:
    return RESPONSES, {
        "input": "Say it again.",
        "instructions": STORY,
        "max_output_tokens": 10,
        "temperature": 0,
    } | fields


def message(**fields: Any) -> tuple[str, Json]:
    return ANTHROPIC, {"messages": MESSAGES[1:], "system": STORY, "max_tokens": 10, "temperature": 0} | fields


NAMED = {"type": "function", "function": {"name": "get_weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
HANDED_OVER = {
    "chat": chat(),
    "tools, auto": chat(tools=[CHAT_TOOL]),
    "tools, required": chat(tools=[CHAT_TOOL], tool_choice="required", max_tokens=32),
    "tools, named": chat(tools=[CHAT_TOOL], tool_choice=NAMED, max_tokens=32),
    "tools, none": chat(tools=[CHAT_TOOL], tool_choice="none"),
    "json schema": chat(response_format=JSON_SCHEMA, max_tokens=20),
    "structured outputs": chat(structured_outputs={"choice": ["sunny weather", "rainy weather"]}),
    "logprobs": chat(logprobs=True, top_logprobs=2, max_tokens=6),
    "stop": chat(stop=[" the", "."]),
    "stop at once": chat(structured_outputs={"choice": ["sunny"]}, stop=["s", "su", "sunny"]),
    "min_tokens": chat(min_tokens=8, max_completion_tokens=10),
    "one token": chat(max_tokens=1),
    "completion": complete(logprobs=2),
    "response": respond(),
    "response, tools": respond(tools=[RESPONSE_TOOL], tool_choice="required", max_output_tokens=32),
    "response, schema": respond(text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}),
    "message": message(),
    "message, any tool": message(tools=[MESSAGE_TOOL], tool_choice={"type": "any"}, max_tokens=32),
    "message, stop": message(stop_sequences=[" the", "."]),
}
ON_ONE = {
    "n": complete(n=2, max_tokens=4, temperature=0.7, seed=3),
    "echo": complete(echo=True, max_tokens=4),
    "beam": complete(use_beam_search=True, n=2, max_tokens=4),
    "two prompts": complete(prompt=["One fish", "Two fish"]),
    "message, named tool": message(
        tools=[MESSAGE_TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=32
    ),
}
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
STREAMED = {"chat", "tools, required", "json schema", "logprobs", "response, tools", "message, any tool"}


def test_a_pair_answers_as_one_engine_does() -> None:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    different: list[str] = []
    with (
        routed(SETTINGS, ("p", "d"), is_pair=True, flags=flags, more_env=STORE) as fleet,
        httpx.Client(timeout=120.0, trust_env=False) as client,
    ):
        for name, (path, body) in (HANDED_OVER | ON_ONE).items():
            body = body | {"model": fleet.model}
            for stream in (False, True) if name in STREAMED else (False,):
                # Of calls that are cut short vLLM's plain answers and streams show other parts.
                body = body | {"stream": stream}
                expected = essence(path, post(client, fleet.urls["d"] + path, body))
                num_before = num_requests(client, fleet, "p")
                got = essence(path, post(client, fleet.router_url + path, body))
                print(f"{name}, {stream=}: {got}" + (f" instead of {expected}" * (got != expected)), flush=True)
                different += [name] * (got != expected)
                assert num_requests(client, fleet, "p") - num_before == (name in HANDED_OVER), name
        assert different == []
        bad = client.post(
            fleet.router_url + CHAT, json=chat(response_format={"type": "json_schema"})[1] | {"model": fleet.model}
        )
        assert bad.status_code == 400, bad.text
        assert num_failures(client, fleet) == {"p": 0, "d": 0}
        follow_responses(client, fleet)


def follow_responses(client: httpx.Client, fleet: Fleet) -> None:
    """Continue a response that the engine has stored, read it, and cancel one in the background."""
    path, body = respond(model=fleet.model)
    made = post(client, fleet.router_url + path, body)
    first = made.json()
    follow_up = {"input": "And now?", "previous_response_id": first["id"], "model": fleet.model, "temperature": 0}
    second = post(client, fleet.router_url + path, follow_up | {"max_output_tokens": 8})
    assert second.json()["previous_response_id"] == first["id"]
    assert second.headers["x-tandem-engine"] == made.headers["x-tandem-engine"]
    read = client.get(f"{fleet.router_url}{path}/{first['id']}")
    assert (read.status_code, read.json()["output"]) == (200, first["output"])
    long = post(client, fleet.router_url + path, body | {"background": True, "max_output_tokens": 2000}).json()
    cancelled = client.post(f"{fleet.router_url}{path}/{long['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    counted = post(client, fleet.router_url + "/v1/messages/count_tokens", message(model=fleet.model)[1] | {}).json()
    assert counted["input_tokens"] > 100
    assert client.post(fleet.router_url + "/v1/embeddings", json={"input": "a"}).status_code == 404


def test_adapters_ranks_and_other_routes_are_expected_as_vllm_caches_them(tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / name, seed) for seed, name in enumerate(("sql", "chat"))]
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-lora", "--max-lora-rank", "8"]
    flags += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    with (
        routed(SETTINGS, ("a",), flags=flags, num_ranks=2, more_env=STORE) as fleet,
        httpx.Client(timeout=120.0, trust_env=False) as client,
    ):
        cards = client.get(fleet.router_url + "/v1/models").json()["data"]
        assert {card["id"]: card["parent"] for card in cards} == {
            fleet.model: None,
            "sql": fleet.model,
            "chat": fleet.model,
        }
        texts = {}
        for model in (fleet.model, "sql", "chat"):
            answers = [thrice(client, fleet, path, body | {"model": model}) for path, body in ASKED]
            texts[model] = str(answers)
        assert len(set(texts.values())) == 3, "each adapter answers in its own way"
        follow_responses(client, fleet)
        used = {engine["name"]: engine["num_requests"] for engine in pools(client, fleet)}
        assert min(used.values()) > 0, used


HISTORY = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
ASKED = [
    chat(max_tokens=8),
    chat(messages=HISTORY, tools=[CHAT_TOOL], max_tokens=8),
    respond(max_output_tokens=8),
    message(max_tokens=8),
]


def thrice(client: httpx.Client, fleet: Fleet, path: str, body: Json) -> Any:
    """Ask three times. The router must expect as many cached tokens as the engine then has."""
    seen = [post(client, fleet.router_url + path, body) for _ in range(3)]
    expected = [int(response.headers["x-tandem-expected-cached-tokens"]) for response in seen]
    print(path, body["model"], [response.headers["x-tandem-engine"] for response in seen], expected, flush=True)
    assert max(expected) > 0, f"{path} of {body['model']}"
    if path != RESPONSES:  # vLLM chooses the rank of a response itself
        assert [cached_tokens(response.json()["usage"]) for response in seen] == expected
    answers = [essence(path, response) for response in seen]
    assert answers[1:] == answers[:-1]
    return answers[0]


def cached_tokens(usage: Json) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for the default model."""
    config = json.loads(Path(resolve_model(DEFAULT_MODEL), "config.json").read_text())
    size, rank, generator = config["hidden_size"], 8, np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = generator.normal(0, 0.05, (rank, size)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = generator.normal(0, 0.05, (size, rank)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))
    return folder


# -- what an answer says, however it came ----------------------------------------------------------------------------


def essence(path: str, response: httpx.Response) -> Any:
    """Texts, calls, reasons to end and log probabilities of an answer, without ids and times."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return essence_of_stream(path, response.text)
    return essence_of_answer(response.json())


def essence_of_answer(answer: Json) -> Any:
    if "choices" in answer:
        return [
            {
                "text": choice.get("text") or choice.get("message", {}).get("content") or "",
                "calls": [call["function"] for call in choice.get("message", {}).get("tool_calls") or []],
                "reason": choice["finish_reason"],
                "tokens": tokens_of(choice.get("logprobs")),
            }
            for choice in answer["choices"]
        ]
    if "output" in answer:
        return [item_essence(item) for item in answer["output"]]
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in answer["content"]]
    return [blocks, answer["stop_reason"], answer.get("stop_sequence")]


def item_essence(item: Json) -> Any:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def tokens_of(logprobs: Json | None) -> list[str]:
    if not logprobs:
        return []
    return logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]


def essence_of_stream(path: str, stream: str) -> Any:
    bodies = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        return essence_of_answer(bodies[-1]["response"])
    if path == ANTHROPIC:
        return message_of_stream(bodies)
    choices: dict[int, Json] = defaultdict(lambda: {"text": "", "calls": {}, "reason": None, "tokens": []})
    for choice in (choice for body in bodies for choice in body["choices"]):
        found, delta = choices[choice["index"]], choice.get("delta", {})
        found["text"] += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            function = found["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            for key in function:
                function[key] += call["function"].get(key) or ""
        found["reason"] = choice["finish_reason"] or found["reason"]
        found["tokens"] += tokens_of(choice.get("logprobs"))
    return [choice | {"calls": list(choice["calls"].values())} for _, choice in sorted(choices.items())]


def message_of_stream(bodies: list[Json]) -> Any:
    blocks: list[Json] = []
    for body in bodies:
        match body["type"]:
            case "content_block_start":
                blocks.append({"text": "", "json": ""} | body["content_block"])
            case "content_block_delta":
                delta = body["delta"]
                blocks[-1]["text"] += delta.get("text", "")
                blocks[-1]["json"] += delta.get("partial_json", "")
    for block in blocks:
        text, arguments = block.pop("text"), block.pop("json")
        block |= {"text": text} if block["type"] == "text" else {"input": arguments}
        block.pop("id", None)
    end = next(body["delta"] for body in bodies if body["type"] == "message_delta")
    return [blocks, end["stop_reason"], end.get("stop_sequence")]


def post(client: httpx.Client, url: str, body: Json) -> httpx.Response:
    response = client.post(url, json=body)
    assert response.status_code == 200, f"{url}: {response.text}"
    return response


def pools(client: httpx.Client, fleet: Fleet) -> list[Json]:
    return list(client.get(fleet.router_url + "/v1/pools").json()["engines"])


def engines_of(client: httpx.Client, fleet: Fleet) -> dict[str, Json]:
    return {engine["name"]: engine for engine in pools(client, fleet)}


def num_requests(client: httpx.Client, fleet: Fleet, engine: str) -> int:
    return int(engines_of(client, fleet)[engine]["num_requests"])


def num_failures(client: httpx.Client, fleet: Fleet) -> dict[str, int]:
    return {name: engine["num_failures"] for name, engine in engines_of(client, fleet).items()}
