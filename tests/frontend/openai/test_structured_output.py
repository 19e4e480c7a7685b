"""A request's constraint reaches the backend as a grammar, and what cannot be kept never does."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, closing

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WANTED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


async def test_every_choice_gets_the_grammar(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    async with closing(backend) as client:
        plain = await client.post("/v1/chat/completions", json={"messages": messages})
        chat = await client.post("/v1/chat/completions", json={"messages": messages, "n": 2, **WANTED})
        wanted = {"structured_outputs": {"json": SCHEMA}}
        texts = await client.post("/v1/completions", json={"prompt": ["a", "b"], **wanted})
    assert [plain.status_code, chat.status_code, texts.status_code] == [200, 200, 200]
    grammars = [request.sampling.grammar for request in backend.requests]
    assert grammars[0] == ""
    assert len(grammars) == 5
    assert len(set(grammars[1:])) == 1
    assert '"required"' in grammars[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {"type": 7}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"choice": ["a" * 100_000]}, "n": 100}, "structured_outputs.choice"),
    ],
)
async def test_what_cannot_be_kept_is_refused(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend(tokenizer)
    async with closing(backend) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert backend.requests == []
