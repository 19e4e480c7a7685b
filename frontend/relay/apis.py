"""The routes of engines that are forwarded: what the router must know of the body, the answer and the stream of each.

A pair of vLLM engines hands KV over on the four routes that generate. The prefill engine gets the body with a limit of
one token, keeps the KV and returns where it is; the decode engine gets the body with that. Each engine must compute the
same prompt, and one request must be one sequence: what is more than that stays on one engine (`can_hand_over`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.frontend.relay.answers import as_dict
from tandem.frontend.relay.prompt_forms import (
    PromptForm,
    chat_form,
    input_form,
    messages_form,
    no_form,
    pairs_form,
    responses_form,
)
from tandem.frontend.relay.sse import ChunkEvents, EventFormat
from tandem.frontend.relay.typed_events import MessageEvents, ResponseEvents
from tandem.frontend.relay.usage import (
    chat_pair_usage,
    messages_pair_usage,
    messages_usage,
    responses_pair_usage,
    responses_usage,
)
from tandem.router.engines.bounded_json import LARGE
from tandem.router.engines.errors import EngineFailed

Json = dict[str, Any]

_KEEP_KV: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Api:
    """A route that generates no tokens: embeddings, scores, tokens of a text. The base of the routes that do."""

    events: EventFormat = ChunkEvents()
    generates = False
    has_stream_options = False  # whether a stream has usage only if the body asks for it

    def __init__(
        self,
        path: str,
        answer_field: str,
        form: Callable[[Json], PromptForm],
        summary: str,
        *,
        is_salted: bool = True,
    ) -> None:
        """Each answer has `answer_field`. `is_salted`: it computes prompts, so it uses the prefix cache."""
        self.path = path
        self.summary = summary
        self.form = form
        self.is_salted = is_salted
        self.answer_field = answer_field

    def is_answer(self, answer: Json) -> bool:
        """Whether this is an answer, and not something else that came with status 200."""
        return answer.get(self.answer_field) is not None

    def max_tokens(self, body: Json) -> int | None:
        """The limit that the request sets for its answer, if any."""
        return 1

    def can_hand_over(self, body: Json) -> bool:
        """Whether one engine may compute the prompt and another one decode."""
        return False

    def prefill_body(self, body: Json) -> Json:
        """The body that makes a prefill engine compute the prompt and keep its KV."""
        return body | {"stream": False, "kv_transfer_params": _KEEP_KV}

    def is_stopped(self, answer: Json) -> bool:
        """Whether the only token of a prefill engine's answer ended it."""
        return False

    def usage(self, answer: Json) -> Json:
        """Usage of a plain answer, in the shape of chat completions."""
        return as_dict(answer.get("usage"))

    def pair_usage(self, usage: Json, prefill: Json) -> Json:
        """The usage of a pair as this route shows it."""
        return chat_pair_usage(usage, prefill)

    def error_body(self, error: Json) -> Json:
        """The body of a response with a client's error."""
        return {"error": error}

    def stored_id(self, body: Json, answer: Json) -> str:
        """The id under which the engine keeps the answer, "" if it does not. `answer` may also be the first event."""
        return ""

    def stored_before(self, body: Json) -> str:
        """The id of an earlier answer that the engine must have kept, "" if there is none."""
        return ""

    def decode_body(self, body: Json, prefill_answer: Json, prefill_engine: str) -> Json:
        """The body that makes a decode engine read the KV and go on. Raises `EngineFailed` if no KV was kept."""
        params = prefill_answer.get("kv_transfer_params")
        if isinstance(params, dict):
            return body | {"kv_transfer_params": params}
        if self.is_stopped(prefill_answer):
            return body  # older versions of vLLM keep no KV then; the decode engine finds the same token
        raise EngineFailed(
            prefill_engine,
            "returned no kv_transfer_params; start it with --kv-transfer-config "
            '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', or give it role both',
        )


class _ChoicesApi(Api):
    """`/v1/chat/completions` and `/v1/completions`."""

    generates = True
    has_stream_options = True

    def is_answer(self, answer: Json) -> bool:
        choices = answer.get("choices")
        if choices is LARGE:
            return True
        return isinstance(choices, list) and bool(choices) and all(isinstance(choice, dict) for choice in choices)

    def max_tokens(self, body: Json) -> int | None:
        return _positive(body.get("max_completion_tokens")) or _positive(body.get("max_tokens"))

    def can_hand_over(self, body: Json) -> bool:
        prompt = body.get("prompt")
        return (
            # Several sequences would read the same blocks, and the first to do so frees them.
            body.get("n") in (None, 1)
            and body.get("best_of") in (None, 1)
            and not body.get("use_beam_search")
            and not (isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int))
            # Prompt probabilities need the whole prompt computed, so its KV is not read from anywhere.
            and not body.get("echo")
            and body.get("prompt_logprobs") is None
            and body.get("prompt_embeds") is None
            # A prompt is truncated to what the answer's limit leaves, and the sub-requests have different limits.
            and body.get("truncate_prompt_tokens") is None
        )

    def prefill_body(self, body: Json) -> Json:
        prefill = super().prefill_body(body) | {"max_tokens": 1}
        if "max_completion_tokens" in body:
            prefill["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens", "return_token_ids"):
            prefill.pop(name, None)
        return prefill

    def is_stopped(self, answer: Json) -> bool:
        choices = answer["choices"]
        return choices is not LARGE and choices[0].get("finish_reason") in ("stop", "tool_calls")


class _ResponsesApi(Api):
    """`/v1/responses`."""

    events = ResponseEvents()
    generates = True

    def max_tokens(self, body: Json) -> int | None:
        return _positive(body.get("max_output_tokens"))

    def can_hand_over(self, body: Json) -> bool:
        tools = body.get("tools") or []
        return (
            # The prefill engine does not have what the decode engine has stored.
            not self.stored_before(body)
            and not body.get("background")
            and body.get("truncation") in (None, "disabled")
            # With tools that the engine itself calls, the engine generates several times.
            and isinstance(tools, list)
            and all(isinstance(tool, dict) and tool.get("type") in ("function", "custom") for tool in tools)
        )

    def prefill_body(self, body: Json) -> Json:
        return super().prefill_body(body) | {"max_output_tokens": 1, "store": False}

    def is_stopped(self, answer: Json) -> bool:
        return answer.get("status") == "completed"

    def usage(self, answer: Json) -> Json:
        return responses_usage(as_dict(answer.get("usage")))

    def pair_usage(self, usage: Json, prefill: Json) -> Json:
        return responses_pair_usage(usage, prefill)

    def stored_id(self, body: Json, answer: Json) -> str:
        if body.get("store") is False:
            return ""
        answer_id = answer.get("id") or as_dict(answer.get("response")).get("id")
        return answer_id if isinstance(answer_id, str) else ""

    def stored_before(self, body: Json) -> str:
        before = body.get("previous_response_id")
        return before if isinstance(before, str) else ""


class _MessagesApi(Api):
    """`/v1/messages`."""

    events = MessageEvents()
    generates = True

    def max_tokens(self, body: Json) -> int | None:
        return _positive(body.get("max_tokens"))

    def can_hand_over(self, body: Json) -> bool:
        # The call of a named tool is decoded from JSON, and one token is not JSON.
        return as_dict(body.get("tool_choice")).get("type") != "tool"

    def prefill_body(self, body: Json) -> Json:
        return super().prefill_body(body) | {"max_tokens": 1}

    def is_stopped(self, answer: Json) -> bool:
        return answer.get("stop_reason") not in (None, "max_tokens")

    def usage(self, answer: Json) -> Json:
        return messages_usage(as_dict(answer.get("usage")))

    def pair_usage(self, usage: Json, prefill: Json) -> Json:
        return messages_pair_usage(usage, prefill)

    def error_body(self, error: Json) -> Json:
        return {"type": "error"} | super().error_body({"type": "invalid_request_error"} | error)


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


CHAT = _ChoicesApi(
    "/v1/chat/completions", "choices", chat_form, "Answer a conversation, at once or as a stream of server-sent events."
)
COMPLETIONS = _ChoicesApi(
    "/v1/completions", "choices", chat_form, "Continue one or many prompts, at once or as a stream of events."
)
RESPONSES = _ResponsesApi(
    "/v1/responses", "output", responses_form, "Answer as OpenAI's Responses API, at once or as a stream of events."
)

APIS = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    _MessagesApi(
        "/v1/messages",
        "content",
        messages_form,
        "Answer as Anthropic's Messages API, at once or as a stream of events.",
    ),
    Api("/v1/embeddings", "data", input_form, "Embeddings of texts."),
    Api("/v1/rerank", "results", pairs_form, "Order documents by their relevance to a query."),
    Api("/v1/score", "data", pairs_form, "Scores of pairs of texts."),
    Api("/pooling", "data", input_form, "What a pooling model computes of texts."),
    Api("/classify", "data", input_form, "Classes of texts."),
    Api("/tokenize", "tokens", no_form, "Token ids of a prompt or of messages.", is_salted=False),
    Api("/detokenize", "prompt", no_form, "Text of token ids.", is_salted=False),
    Api(
        "/v1/messages/count_tokens", "input_tokens", no_form, "Number of tokens of a message's prompt.", is_salted=False
    ),
)
