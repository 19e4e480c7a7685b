"""/openapi.json says what the servers take and answer, and /docs shows it without anything from another host."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.http.answer_shapes import Error, MessagesError
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.openapi import documented_routes
from tandem.frontend.http.request_id import REQUEST_ID_HEADER
from tandem.frontend.openai.other_fields import UNSERVED
from tandem.frontend.openai.schema import EXACTLY_ONE
from tandem.frontend.serve_app import create_app
from tandem.frontend.serve_operations import SERVE_OPERATIONS
from tandem.protocol.config import RouterConfig
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client, route_app, serve_app
from tests.support.fake_backend import Client, FakeBackend, closing, make_app
from tests.support.keys import api_keys_of
from tests.support.toy_tokenizer import build_tokenizer

PAGE = Path(__file__).resolve().parents[3] / "frontend" / "http" / "static"
APPS = {"serve": serve_app(), "route": route_app()}


def document_of(backend: FakeBackend) -> Any:
    return make_app(backend).openapi()


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(one)


@pytest.mark.parametrize("command", APPS)
def test_every_route_is_in_the_document_and_nothing_else(command: str) -> None:
    app = APPS[command]
    routes = {(method.lower(), path.replace(":path", "")) for method, path, _ in documented_routes(app.router.routes)}
    shown = {(method, path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert shown == routes
    assert {("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("post", "/v1/messages")} < shown


@pytest.mark.parametrize("command", APPS)
def test_the_document_holds_together(command: str) -> None:
    document = APPS[command].openapi()
    assert json.loads(json.dumps(document)) == document
    schemas, headers = (document["components"][kind] for kind in ("schemas", "headers"))
    known = {f"#/components/schemas/{name}" for name in schemas} | {f"#/components/headers/{name}" for name in headers}
    assert {one["$ref"] for one in objects(document) if isinstance(one.get("$ref"), str)} <= known
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids)
    assert all(one["summary"] and {"400", "500", "503"} < one["responses"].keys() for one in operations)
    assert all(answer["description"] for one in operations for answer in one["responses"].values())


def test_bodies_have_the_bounds_and_texts_of_what_decodes_them() -> None:
    document = APPS["serve"].openapi()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["required"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"] == {
        "description": "0 = greedy.",
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}],
    }
    structs = [schema for schema in schemas.values() if "properties" in schema]
    assert structs
    assert all(schema["additionalProperties"] is True for schema in structs), "unknown fields are ignored"


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "PinFields"])
def test_the_schema_of_a_field_that_is_not_served_takes_just_those_values(name: str) -> None:
    fields = APPS["serve"].openapi()["components"]["schemas"][name]["properties"]
    tried = [None, 0, 1, 2, "", "x", "none", "auto", [], ["text"], ["audio"], ["text", "text"], False, True, {}]
    for field, values in UNSERVED.items():
        if fields[field].get("description", "").startswith("Not served"):
            for value in tried:
                expected = any(type(value) is type(one) and value == one for one in (None, *values))
                assert fits(fields[field], value) == expected, (field, value)


@pytest.mark.parametrize("command", APPS)
def test_no_enum_has_what_generators_of_clients_do_not_know(command: str) -> None:
    for one in objects(APPS[command].openapi()):
        if isinstance(values := one.get("enum"), list):
            assert all(isinstance(value, str | None) or type(value) is int for value in values), values


def test_the_document_of_a_router_says_what_it_forwards() -> None:
    document = APPS["route"].openapi()
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/chat/completions"):
        operation = document["paths"][path]["post"]
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer["description"] == "As the engine wrote it."
        assert "4XX" in operation["responses"]
    assert document["paths"]["/v1/engines"]["get"]["security"] == [{"adminToken": []}]
    assert "text/event-stream" not in document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]


def test_keys_are_in_the_document_of_a_server_that_has_them(tokenizer: Tokenizer) -> None:
    backend: Any = FakeBackend(tokenizer)
    keys = api_keys_of({"any": "*"})
    closed = create_app(backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=keys).openapi()
    assert closed["security"] == [{"apiKey": []}, {"xApiKey": []}]
    assert closed["paths"]["/health"]["get"]["security"] == []
    chat = closed["paths"]["/v1/chat/completions"]["post"]
    assert "security" not in chat
    assert chat["responses"]["401"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    messages = closed["paths"]["/v1/messages"]["post"]
    assert messages["responses"]["401"]["content"]["application/json"]["schema"]["$ref"].endswith("/MessagesError")
    open_server = document_of(backend)
    assert "security" not in open_server
    assert "401" not in open_server["paths"]["/v1/chat/completions"]["post"]["responses"]


# -- what is answered has the shape of the document


def conforms(value: Any, shape: Any) -> None:
    """Raise if `value` is not of the documented shape, or has a field that the document lacks."""
    assert msgspec.to_builtins(msgspec.convert(value, shape)) == value


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


THINKING = "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = [
    ("/v1/chat/completions", CHAT | {"tools": [WEATHER], "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "weather"}]}),
    ("/v1/messages", CHAT | {"max_tokens": 99, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
async def test_answers_and_events_have_the_documented_shape(tmp_path: Path, path: str, body: Any) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, THINKING))
    backend = FakeBackend(tokenizer, f"I see.</think>I look.{CALL}")
    operation = SERVE_OPERATIONS["POST", path]
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    async with closing(backend) as client:
        plain = await client.post(path, json=body)
        stream = await client.post(path, json=body | {"stream": True} | options)
        wrong = await client.post(path, json={})
    assert plain.status_code == stream.status_code == 200, plain.text
    conforms(plain.json(), operation.answer)
    for event in events_of(stream.text):
        conforms(event, operation.event)
    conforms(wrong.json(), MessagesError if path == "/v1/messages" else Error)


async def test_the_other_answers_have_the_documented_shape(client: Client) -> None:
    stored = (await client.post("/v1/responses", json={"input": "hi"})).json()["id"]
    pin = (await client.post("/v1/cache/pin", json={"prompt": "hi"})).json()["id"]
    asked: list[tuple[str, str, str, Any]] = [
        ("POST", "/tokenize", "", {"prompt": "hi", "return_token_strs": True}),
        ("POST", "/detokenize", "", {"tokens": [1]}),
        ("POST", "/v1/messages/count_tokens", "", CHAT),
        ("POST", "/v1/responses/input_tokens", "", {"input": "hi"}),
        ("POST", "/v1/cache/pin", "", {"prompt": "hi"}),
        ("GET", "/v1/cache/pins", "", None),
        ("POST", "/v1/cache/prefetch", "", {"id": pin}),
        ("POST", "/v1/cache/unpin", "", {"id": pin}),
        ("GET", "/v1/models", "", None),
        ("GET", "/v1/models/{model_id:path}", "/v1/models/org/toy", None),
        ("GET", "/v1/responses/{response_id}", f"/v1/responses/{stored}", None),
        ("GET", "/v1/responses/{response_id}/input_items", f"/v1/responses/{stored}/input_items", None),
        ("DELETE", "/v1/responses/{response_id}", f"/v1/responses/{stored}", None),
        ("POST", "/v1/pools/check", "", None),
        ("POST", "/v1/pools/migrate", "", {"worker": "d"}),
        ("POST", "/v1/route/explain", "", {"prompt": "hi"}),
        ("GET", "/v1/route/decisions", "", None),
        ("GET", "/health", "", None),
        ("GET", "/version", "", None),
    ]
    for method, route, path, body in asked:
        response = await client.request(method, path or route, json=body)
        assert response.status_code == 200, (route, response.text)
        conforms(response.json(), SERVE_OPERATIONS[method, route].answer)
    structs = {one for one in SERVE_OPERATIONS if not isinstance(SERVE_OPERATIONS[one].answer, dict | None)}
    tried = {(method, route) for method, route, *_ in asked} | {("POST", path) for path, _ in BODIES}
    assert structs - tried == {("GET", "/ready")}, "its fake has no worker"


@pytest.mark.parametrize("command", APPS)
def test_every_request_may_have_an_id_and_every_answer_has_one(command: str) -> None:
    for methods in APPS[command].openapi()["paths"].values():
        for operation in methods.values():
            names = [one["name"] for one in operation["parameters"]]
            assert REQUEST_ID_HEADER in names
            assert len(set(names)) == len(names)
            for response in operation["responses"].values():
                assert REQUEST_ID_HEADER in response["headers"]


def fits(schema: Any, value: Any) -> bool:
    """Whether a value fits a schema that has `oneOf` beside other rules."""
    validator = jsonschema.Draft202012Validator(schema | {"components": APPS["serve"].openapi()["components"]})
    return bool(validator.is_valid(value))


@pytest.mark.parametrize("name", EXACTLY_ONE)
async def test_exactly_one_is_a_rule_of_the_schema_and_of_the_server(name: str, client: Client) -> None:
    texts: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "conversation_id": "c"}
    names = EXACTLY_ONE[name]
    given: list[tuple[bool, Any]] = [(True, {one: texts[one]}) for one in names]
    given += [(True, {one: texts[one]} | dict.fromkeys(set(names) - {one})) for one in names]
    given += [(False, {one: texts[one] for one in pair}) for pair in itertools.combinations(names, 2)]
    given += [(False, {}), (False, dict.fromkeys(names))]
    path = {"TokenizeRequest": "/tokenize", "PinFields": "/v1/cache/pin"}[name]
    for is_right, value in given:
        assert fits({"$ref": f"#/components/schemas/{name}"}, value) == is_right, value
        error = (await client.post(path, json=value)).json().get("error") or {"message": ""}
        assert ("exactly one of" in error["message"]) == (not is_right), (value, error)


# -- the page


def client_with_keys(tokenizer: Tokenizer) -> httpx.AsyncClient:
    backend: Any = FakeBackend(tokenizer)
    app = create_app(backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=api_keys_of({"any": "*"}))
    return app_client(app)


async def test_the_page_needs_no_key_and_the_document_does(tokenizer: Tokenizer) -> None:
    async with client_with_keys(tokenizer) as client:
        page = await client.get("/docs")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        for name in re.findall(r'(?:src|href)="docs/([^"]+)"', page.text):
            assert (await client.get(f"/docs/{name}")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 401
        shown = await client.get("/openapi.json", headers={"authorization": "Bearer any"})
        assert "/v1/chat/completions" in shown.json()["paths"]
        for gone in ("/redoc", "/docs/oauth2-redirect"):
            assert (await client.get(gone, headers={"authorization": "Bearer any"})).status_code == 404


def test_the_page_names_no_other_host_and_has_nothing_inline() -> None:
    files = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert "index.html" in files
    for name, text in files.items():
        assert not re.search(r"https?:(?!//www.w3.org/2000/svg)", text), name
        assert "innerHTML" not in text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", files["index.html"])
    imported = {name for text in files.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert imported <= files.keys()


def test_an_app_without_operations_has_an_empty_document() -> None:
    from tandem.frontend.http.metrics import FrontendMetrics

    app = RouterApp(RouterConfig(), FrontendMetrics(CollectorRegistry()), api_keys_of({}))
    assert app.openapi()["paths"] == {}
