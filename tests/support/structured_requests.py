"""Requests with grammars, drawn at random: what any worker must answer with the same tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance


def json_grammar(schema: dict[str, Any], **overrides: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False} | overrides)


def regex_grammar(regex: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(regex)


def lark_grammar(lark: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required, **others}


_SHORT = {"type": "string", "maxLength": 6}
_UNIT = {"enum": ["celsius", "fahrenheit"]}
_RECORD = _closed({"description": _SHORT, "quantity": {"type": "integer", "minimum": 0, "maximum": 99}})
_INVOICE = _closed(
    {
        "invoice_number": _SHORT,
        "line_items": {"type": "array", "items": _RECORD, "minItems": 1, "maxItems": 3},
        "currency": {"enum": ["EUR", "USD"]},
        "is_paid": {"type": "boolean"},
    }
)
_CALL = 'start: "<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": " args "}\\n</tool_call>"\nargs: %json '
FORCING = [  # grammars with long texts that are the only ones allowed
    json_grammar(_INVOICE),
    json_grammar(_closed({"temperature": {"type": "integer"}, "unit": _UNIT}), whitespace_flexible=True),
    lark_grammar(_CALL + json.dumps(_closed({"location": _SHORT, "unit": _UNIT}))),
    lark_grammar(f'start: "begin" /[xyz]/ "{"the middle of it, " * 12}" /[xyz]/ "end"'),
]
GRAMMARS = [
    *FORCING,
    json_grammar({"type": "object"}, whitespace_flexible=True),
    regex_grammar("[a-z ]{10,60}"),
    regex_grammar("(hello|help|hell no)(, (hello|world)){0,5}"),
    regex_grammar("é{3}(ñ|日本)+🎉"),
    lark_grammar('start: "yes" | "yesterday" | "no" start'),
    lark_grammar("start: /(?s:.*)/"),
]


def random_sampling(source: random.Random, *, vocab_size: int) -> dict[str, Any]:
    """Fields of `SamplingParams`: a grammar, and a few others that bear on the same choice of tokens."""
    fields: dict[str, Any] = {
        "grammar": source.choice(FORCING if source.random() < 0.5 else GRAMMARS),
        "max_tokens": source.choice([1, 2, 7, 30, 120, 250]),
        "ignore_eos": source.random() < 0.3,
        "seed": source.randrange(1 << 32),
        "temperature": source.choice([0.0, 0.0, 0.7, 1.5]),
    }
    others: dict[str, Any] = {
        "top_k": source.choice([1, 5, 40]),
        "top_p": source.choice([0.1, 0.9]),
        "min_p": 0.2,
        "min_tokens": source.choice([3, 25]),
        "stop_token_ids": tuple(source.sample(range(vocab_size), 3)),
        "frequency_penalty": source.choice([-1.0, 0.7]),
        "presence_penalty": 1.1,
        "repetition_penalty": source.choice([0.7, 1.4]),
        "logit_bias": {source.randrange(vocab_size): source.choice([-100.0, -3.0, 5.0, 100.0]) for _ in range(20)},
        "num_logprobs": source.choice([0, 3]),
    }
    return fields | {name: others[name] for name in others if source.random() < 0.2}
