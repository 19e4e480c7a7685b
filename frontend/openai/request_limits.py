"""Limits on what one request may ask for, in counts, sizes and products of its fields. Beyond them it gets a 400.

One field may be large, but not all of them together: what a request holds, sends and computes is their product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.frontend.openai.schema import ChatMessage, GenerationFields
from tandem.protocol.errors import RequestError

MAX_SEQUENCES = 2048  # prompts times n
MAX_STOPS = 1024  # OpenAI: 4
MAX_STOP_CHARS = 4096  # of one stop string
MAX_STOPS_CHARS = 16_384  # of all stop strings; in the automaton each character takes about 200 bytes
MAX_TOKEN_RULES = 65_536  # entries of logit_bias and stop_token_ids, times sequences: each sequence sends them
MAX_STEP_LOGPROBS = 4096  # for one token of every sequence
MAX_HELD_LOGPROBS = 1 << 24  # for all tokens of all sequences, in an answer that is not streamed
MAX_SCORED_LOGPROBS = 1 << 20  # for all prompt tokens of all sequences: JSON of 35 MB
MAX_PROMPT_TOKENS = 1 << 24  # of all sequences, each of which sends its prompt: 128 prompts of 131,072 tokens
MAX_ECHO_CHARS = 1 << 24  # of all sequences
MAX_GRAMMAR_CHARS = 1 << 22  # of all sequences, each of which sends its grammar
MAX_MESSAGES = 16_384
MAX_MESSAGE_PARTS = 65_536  # content parts and tool calls of all messages
MAX_TEMPLATE_OPTIONS = 64


def check_fields(fields: GenerationFields, num_prompts: int, num_logprobs: int | None) -> None:
    """Raise `RequestError` if the fields of a request with this number of prompts ask for too much."""
    num_sequences = num_prompts * (fields.n or 1)
    _check(num_sequences, MAX_SEQUENCES, "sequences (prompts times n)", "n" if (fields.n or 1) > 1 else "prompt")
    num_biases, num_stop_ids = len(fields.logit_bias or ()), len(fields.stop_token_ids or ())
    param = "logit_bias" if num_biases > num_stop_ids else "stop_token_ids"
    what = "entries of logit_bias and stop_token_ids, times its sequences (prompts times n)"
    _check((num_biases + num_stop_ids) * num_sequences, MAX_TOKEN_RULES, what, param)
    if num_logprobs is not None:
        what = "log probabilities of a token (1 + the number asked for), times its sequences (prompts times n)"
        _check((1 + num_logprobs) * num_sequences, MAX_STEP_LOGPROBS, what, "logprobs")


def check_stops(stops: Sequence[str]) -> None:
    """Raise `RequestError` for too many stop strings, or too long ones."""
    _check(len(stops), MAX_STOPS, "stop strings", "stop")
    _check(max(map(len, stops), default=0), MAX_STOP_CHARS, "characters in one stop string", "stop")
    _check(sum(map(len, stops)), MAX_STOPS_CHARS, "characters in its stop strings", "stop")


def check_messages(messages: Sequence[ChatMessage], template_kwargs: dict[str, object] | None) -> None:
    """Raise `RequestError` for a conversation of too many parts: even empty ones take time to render."""
    check_num_parts(len(messages), sum(_num_parts(message) for message in messages), "messages")
    _check(len(template_kwargs or ()), MAX_TEMPLATE_OPTIONS, "template options", "chat_template_kwargs")


def check_num_parts(num_messages: int, num_parts: int, param: str) -> None:
    """Raise `RequestError` for a conversation of too many parts: even converting them to another form takes time."""
    _check(num_messages, MAX_MESSAGES, "messages", param)
    _check(num_parts, MAX_MESSAGE_PARTS, "content parts and tool calls", param)


def check_prompt_tokens(lengths: Iterable[int], num_siblings: int) -> None:
    """Raise `RequestError` if the prompts of all sequences have too many tokens together."""
    _check(sum(lengths) * num_siblings, MAX_PROMPT_TOKENS, "prompt tokens (prompts times n)", "n")


def check_held_logprobs(num_tokens: int, num_logprobs: int) -> None:
    """Raise `RequestError` if an answer of this many tokens, not streamed, would hold too many log probabilities."""
    what = "log probabilities (1 + the number asked for, times max_tokens of each sequence) in an answer not streamed"
    _check((1 + num_logprobs) * num_tokens, MAX_HELD_LOGPROBS, what, "max_tokens")


def check_scored_prompts(lengths: Iterable[int], num_siblings: int, num_logprobs: int) -> None:
    """Raise `RequestError` if the repeated prompts would have too many log probabilities."""
    what = "log probabilities of prompt tokens (1 + the number asked for, times the tokens of all prompts, times n)"
    _check((1 + num_logprobs) * sum(lengths) * num_siblings, MAX_SCORED_LOGPROBS, what, "logprobs")


def check_echo(texts: Iterable[str], num_siblings: int) -> None:
    """Raise `RequestError` if the repeated prompts are too long together."""
    _check(sum(map(len, texts)) * num_siblings, MAX_ECHO_CHARS, "characters to echo (prompts times n)", "echo")


def check_grammar(grammar: str, num_sequences: int, param: str) -> None:
    """Raise `RequestError` if the grammars of all sequences are too long together."""
    _check(len(grammar) * num_sequences, MAX_GRAMMAR_CHARS, "characters of grammar (prompts times n)", param)


def _num_parts(message: ChatMessage) -> int:
    num_parts = len(message.tool_calls or ())
    return num_parts + len(message.content) if isinstance(message.content, list) else num_parts


def _check(number: int, limit: int, what: str, param: str | None) -> None:
    if number > limit:
        raise RequestError(
            f"The request has {number} {what}; the limit is {limit}. Ask for less, or send several requests.",
            param=param,
        )
