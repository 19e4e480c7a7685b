"""Bodies of any shape: whatever a client sends, the engine answers it; nothing here may raise."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.relay.apis import APIS
from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.digest import EVERYONE
from tandem.text.tokenizer import Tokenizer

WORDS = [
    *("type", "role", "content", "text", "name", "arguments", "call_id", "output", "summary", "id", "tool_use_id"),
    *("source", "thinking", "input_schema", "parameters", "function", "status", "effort", "format", "input"),
]
TYPES = [
    *("message", "text", "input_text", "output_text", "reasoning", "function", "function_call", "function_call_output"),
    *("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "user", "assistant", "system", "tool"),
]
LEAVES = st.none() | st.booleans() | st.integers(-2, 2**33) | st.sampled_from(TYPES) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=12,
)
FIELDS = [
    *("input", "instructions", "messages", "system", "tools", "tool_choice", "prompt", "reasoning", "thinking"),
    *("output_config", "chat_template_kwargs", "previous_response_id", "n", "store", "max_tokens", "query"),
    "documents",
    *("reasoning_effort", "truncation", "text_1", "best_of", "background"),
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)


@given(BODIES)
def test_no_body_breaks_what_is_read_of_it(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    for api in APIS:
        for reader in (PromptReader(), PromptReader(tokenizer)):
            prompt = reader.read(api.form(body), EVERYONE, 1000)
            assert all(0 <= token < 2**32 for token in prompt.token_ids)
        assert api.max_tokens(body) is None or api.max_tokens(body)
        assert api.can_hand_over(body) in (True, False)
        assert isinstance(api.stored_before(body), str)
        msgspec.json.encode(api.prefill_body(body))


@given(st.dictionaries(st.sampled_from(["usage", "id", "response", "output", "choices", "status"]), VALUES, max_size=4))
def test_no_answer_breaks_what_is_read_of_it(answer: dict[str, Any]) -> None:
    for api in APIS:
        usage = api.usage(answer)
        api.pair_usage(answer["usage"] if isinstance(answer.get("usage"), dict) else {}, usage)
        assert isinstance(api.stored_id({}, answer), str)
        event = api.events.parse(b"event: x\ndata: " + msgspec.json.encode(answer) + b"\n\n")
        if event.usage is not None:
            assert api.events.corrected(event, usage).usage is not None
