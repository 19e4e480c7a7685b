"""A request's constraint reaches the backend as a grammar, and what cannot be kept never does."""

from __future__ import annotations

from tests.support.fake_backend import Client, FakeBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WANTED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


async def test_every_choice_gets_the_grammar(backend: FakeBackend, client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = await client.post("/v1/chat/completions", json={"messages": messages})
    chat = await client.post("/v1/chat/completions", json={"messages": messages, "n": 2, **WANTED})
    wanted = {"structured_outputs": {"json": SCHEMA}}
    texts = await client.post("/v1/completions", json={"prompt": ["a", "b"], **wanted})
    assert [plain.status_code, chat.status_code, texts.status_code] == [200, 200, 200]
    grammars = [request.sampling.grammar for request in backend.requests]
    assert (grammars[0], len(grammars), len(set(grammars[1:]))) == ("", 5, 1)
    assert '"required"' in grammars[1]
