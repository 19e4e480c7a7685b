"""Which streams can continue on another engine after tokens were shown, and the request that continues them.

The next engine gets the prompt and the tokens so far as one prompt of token ids. So a stream can go on only if its next
token depends on nothing else. Options that treat tokens of the answer unlike those of the prompt, or that keep a state
between tokens, must be off. Unknown fields count as such options. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.frontend.relay.answers import as_count
from tandem.frontend.relay.apis import CHAT, COMPLETIONS, Api

Json = dict[str, Any]

_DEFAULT_MAX_TOKENS = 16  # default of /v1/completions, as in OpenAI's API

# Fields that the next engine gets as they are.
_CARRIED = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"),
        # NOTE: unlike the other penalties, it counts tokens of the prompt and of the answer alike.
        *("repetition_penalty",),
        *("logit_bias", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("stream", "stream_options", "priority", "user", "cache_salt"),
    }
)
# Fields that only shape the prompt, whose token ids are known, or that do not affect tokens.
_SETTLED = frozenset(
    {
        *("prompt", "messages", "stop", "min_tokens", "max_tokens", "max_completion_tokens", "return_token_ids"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template"),
        *("chat_template_kwargs", "documents", "metadata", "store", "service_tier", "safety_identifier"),
        *("cache_hints", "prompt_cache_key", "session_id", "conversation_id", "parallel_tool_calls"),
    }
)
# Fields that must be unset or have one of these values: otherwise their effect would start over.
_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "bad_words": ([],),
}


def obstacle(api: Api, body: Json) -> str:
    """Why a stream of this request cannot continue on another engine; "" if it can."""
    if api is not CHAT and api is not COMPLETIONS:
        return f"streams of {api.path} have a state that other engines do not have"
    for name, value in body.items():
        if value is None or (name in _CARRIED and name not in _OFF) or name in _SETTLED:
            continue
        if not any(type(value) is type(off) and value == off for off in _OFF.get(name, ())) and not (
            name == "seed" and body.get("temperature") == 0
        ):
            return f"'{name[:50]}' is set"
    if stops_of(body) is None:
        return "'stop' is neither a text nor a list of texts"
    if body.get("stop") and body.get("min_tokens"):
        return "'min_tokens' is set beside 'stop'"
    return _prompt_obstacle(api, body)


def stops_of(body: Json) -> list[str] | None:
    """The stop strings of a request; None if they are not strings."""
    stops = body.get("stop")
    if stops is None or isinstance(stops, str):
        return [stops] if stops else []
    if isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops):
        return stops
    return None


def continued_body(
    api: Api, body: Json, prompt_ids: Sequence[int], output_ids: Sequence[int], max_model_len: int | None
) -> Json:
    """The body of the completion that goes on behind `output_ids`. Stop strings are left to the router.

    `max_model_len` limits an answer that its request does not limit.
    """
    num_known = len(prompt_ids) + len(output_ids)
    limit = api.max_tokens(body)
    if limit is None and api is COMPLETIONS:
        limit = _DEFAULT_MAX_TOKENS
    carried = {name: value for name, value in body.items() if name in _CARRIED}
    carried["prompt"] = [*prompt_ids, *output_ids]
    carried["return_token_ids"] = True
    if limit is not None:
        carried["max_tokens"] = max(limit - len(output_ids), 1)
    else:
        carried["max_tokens"] = max(max_model_len - num_known, 1) if max_model_len else None
    if (num_left := as_count(body.get("min_tokens")) - len(output_ids)) > 0:
        carried["min_tokens"] = num_left
    return carried


def _prompt_obstacle(api: Api, body: Json) -> str:
    if api is COMPLETIONS:
        prompt = body.get("prompt")
        is_one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))
        return "" if is_one else "it has several prompts"
    messages = body.get("messages")
    is_text = isinstance(messages, list) and all(isinstance(one, dict) and _is_text(one) for one in messages)
    return "" if is_text else "its messages are more than text"


def _is_text(message: Json) -> bool:
    content = message.get("content")
    return (
        content is None
        or isinstance(content, str)
        or (isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content))
    )
