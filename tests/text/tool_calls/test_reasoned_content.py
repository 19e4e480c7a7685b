"""Reasoning, and content that must match a grammar behind it: in every format, plain and streamed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.grammar import compile_grammar, make_grammar_tokenizer
from tandem.router.backend import GenerateRequest
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.reasoning import REASONING_FORMATS
from tests.frontend.openai.test_tools import CHAT, ROLES, joined
from tests.support.fake_backend import FakeBackend, Step, closing, events
from tests.support.toy_tokenizer import build_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "</think>", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}
HARMONY = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


class WalkingBackend(FakeBackend):
    """Writes reasoning, and then whatever the request's grammar lets through; each choice something else."""

    def __init__(self, tokenizer: Tokenizer, before: str, seed: int) -> None:
        super().__init__(tokenizer, run=random.Random(seed).choice([1, 3, 50]))
        self.max_model_len = 4096
        self.script = self._walk
        eos = tokenizer.special_tokens["</s>"]
        self._grammars = make_grammar_tokenizer(tokenizer.to_json(), tokenizer.vocab_size, [eos])
        ids = range(tokenizer.vocab_size)
        self._blank = {token_id for token_id in ids if tokenizer.decode([token_id]) in " \n\t\r"}
        self._before = before
        self._source = random.Random(seed)

    def _walk(self, request: GenerateRequest) -> list[Step]:
        matcher = compile_grammar(self._grammars, request.sampling.grammar)
        before = self.tokenizer.encode(self._before, add_special_tokens=False)
        assert matcher.consume_tokens(before), "reasoning is not let through"
        ids: list[int] = []
        while not matcher.is_stopped() and not (matcher.is_accepting() and self._source.random() < 0.3):
            allowed = [i for i, weight in enumerate(matcher.compute_logit_bias()) if weight]
            ids.append(self._source.choice([i for i in allowed if i not in self._blank] or allowed))
            assert matcher.consume_token(ids[-1])
            assert len(ids) < 2000
        self.reply = self._before + self.tokenizer.decode(ids)
        return self.reply_steps(request)


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("is_open", [False, True], ids=["", "open"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_the_constraint_begins_after_the_reasoning(
    tmp_path: Path, name: str, is_special: bool, is_open: bool, is_streamed: bool
) -> None:
    format = REASONING_FORMATS[name]
    if name == "harmony" and (is_open or not is_special):
        pytest.skip("harmony's markers are special tokens, and its prompts open no reasoning")
    opening, closing_text = HARMONY if name == "harmony" else (format.opening, format.closing)
    template = ROLES + (opening if is_open else "")
    tokenizer = Tokenizer(build_tokenizer(tmp_path, template, format.markers if is_special else ()))
    for seed in range(2):
        thought = 'Hm, {"a": 1}? é' if seed % 2 else ""
        before = ("" if is_open else opening) + thought + closing_text
        backend = WalkingBackend(tokenizer, before, seed)
        async with closing(backend, reasoning_parser=name) as client:
            response = await client.post(CHAT, json=BODY | {"stream": is_streamed})
            assert response.status_code == 200, response.text
        if is_streamed:
            answer = joined(events(response))
            content, reasoning = answer["content"], answer["reasoning"]
        else:
            message = response.json()["choices"][0]["message"]
            content, reasoning = message["content"], message.get("reasoning") or ""
        value = json.loads(content)
        assert value.keys() == {"a", "b"}
        assert value["b"] in ("x", "</think>", "yy")
        assert reasoning == thought


@pytest.mark.parametrize("name", REASONING_FORMATS)
async def test_content_without_reasoning_must_match_too(tmp_path: Path, name: str) -> None:
    format = REASONING_FORMATS[name]
    tokenizer = Tokenizer(build_tokenizer(tmp_path, ROLES, format.markers))
    backend = WalkingBackend(tokenizer, "<|channel|>final<|message|>" if name == "harmony" else "", 1)
    async with closing(backend, reasoning_parser=name) as client:
        message = (await client.post(CHAT, json=BODY)).json()["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"a", "b"}
    assert not message.get("reasoning")
