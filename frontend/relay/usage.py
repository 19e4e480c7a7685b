"""Usage as the three APIs report it, read into the shape of one: that of chat completions.

    chat completions   prompt_tokens               completion_tokens  prompt_tokens_details.cached_tokens
    responses          input_tokens                output_tokens      input_tokens_details.cached_tokens
    messages           input_tokens, without those that were cached   output_tokens   cache_read_input_tokens

For a pair, cached tokens are those that the prefill engine did not compute, not those that it handed over. So each API
has a function that corrects its usage by that of the prefill engine.
"""

from __future__ import annotations

from typing import Any

from tandem.frontend.relay.answers import as_count, as_dict

Json = dict[str, Any]


def num_cached_tokens(usage: Json) -> int:
    """Cached prompt tokens in a usage object of chat completions."""
    return as_count(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens"))


def chat_pair_usage(usage: Json, prefill: Json) -> Json:
    """The decode engine's usage, corrected by the prefill engine's."""
    return usage | {"prompt_tokens_details": prefill.get("prompt_tokens_details")}


def responses_usage(usage: Json) -> Json:
    """Usage of a response, in the shape of chat completions."""
    details = as_dict(usage.get("input_tokens_details"))
    return _usage(usage.get("input_tokens"), usage.get("output_tokens"), details.get("cached_tokens"))


def responses_pair_usage(usage: Json, prefill: Json) -> Json:
    """The decode engine's usage of a response, corrected by the prefill engine's."""
    details = as_dict(usage.get("input_tokens_details")) | {"cached_tokens": num_cached_tokens(prefill)}
    return usage | {"input_tokens_details": details}


def messages_usage(usage: Json) -> Json:
    """Usage of a message, in the shape of chat completions."""
    num_cached = usage.get("cache_read_input_tokens")
    return _usage(_num_prompt_tokens(usage), usage.get("output_tokens"), num_cached)


def messages_pair_usage(usage: Json, prefill: Json) -> Json:
    """The decode engine's usage of a message, corrected by the prefill engine's."""
    if "cache_read_input_tokens" not in usage:
        return usage
    num_cached = num_cached_tokens(prefill)
    num_others = as_count(usage.get("cache_creation_input_tokens")) + num_cached
    num_input = max(_num_prompt_tokens(usage) - num_others, 0)
    return usage | {"input_tokens": num_input, "cache_read_input_tokens": num_cached}


def _num_prompt_tokens(usage: Json) -> int:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(as_count(usage.get(name)) for name in names)


def _usage(num_prompt: Any, num_output: Any, num_cached: Any) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
