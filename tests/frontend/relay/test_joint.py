"""Streams that are cut anywhere and joined again. Clients must see what one undisturbed engine would have sent."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import pytest

from tandem.frontend.relay.apis import APIS, CHAT, COMPLETIONS
from tandem.frontend.relay.continuation import continued_body, obstacle, stops_of
from tandem.frontend.relay.joint import CannotContinue, ContinuedStream, find_joint
from tandem.frontend.relay.stream_ledger import StreamLedger
from tests.support.scripted_engine import PROMPT_IDS, Script, events

ALPHABET = ["a", "b", " ", "é", "日", "🙂", "\n", "ab", '"token_ids":[1]']


def random_script(rng: random.Random) -> Script:
    data = "".join(rng.choices(ALPHABET, k=rng.randint(1, 25))).encode()
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randint(0, len(data))))})
    return Script([data[start:end] for start, end in itertools.pairwise(cuts)])


def random_body(rng: random.Random, *, is_chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": rng.randint(1, 40)}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    body |= {"stream_options": {"include_usage": True}}
    if rng.random() < 0.6:
        body["stop"] = ["".join(rng.choices(ALPHABET[:5], k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
    return body


def new_ledger(*, is_chat: bool, shows_ids: bool = False) -> StreamLedger:
    return StreamLedger(is_chat=is_chat, shows_ids=shows_ids, shows_running_usage=False)


def decoder(script: Script) -> Callable[[list[int]], Awaitable[str]]:
    async def decode(ids: list[int]) -> str:
        return script.decode(ids)

    return decode


async def run(script: Script, body: dict[str, Any], deaths: Iterable[int], *, is_chat: bool, merged: int = 1) -> bytes:
    """The stream that a client sees. `deaths` has, for each engine that dies, the number of events it sends before."""
    api, ledger = (CHAT if is_chat else COMPLETIONS), new_ledger(is_chat=is_chat)
    assert obstacle(api, body) == ""
    sent, chat, rewrite = body | {"return_token_ids": True}, is_chat, ledger.follow
    shown = b""
    for death in [*deaths, None]:
        stream = list(events(script, sent, is_chat=chat, tokens_per_event=merged))[:death]
        reads = stream if merged == 1 else [b"".join(stream[i : i + merged]) for i in range(0, len(stream), merged)]
        for read in reads:
            shown += rewrite(read)[0]
            if shown.endswith(b"data: [DONE]\n\n"):
                assert not ledger.flaw
                return shown
        if ledger.is_finished:
            return shown + ledger.ending()
        if not ledger.output_ids:
            ledger.restart()
            continue
        stops = stops_of(body) or []
        held = max(map(len, stops), default=1) - 1
        joint = await find_joint(ledger.prompt_ids or (), ledger.output_ids, ledger.text, held, decoder(script))
        rewrite = ContinuedStream(ledger, joint, stops).rewrite
        sent = continued_body(api, body, ledger.prompt_ids or (), ledger.output_ids, max_model_len=None)
        chat = False
    raise AssertionError("the last engine does not die")


def seen(shown: bytes) -> dict[str, Any]:
    """What a client reads in a stream: text, finish reasons, usage, and the form of its events."""
    bodies = [msgspec.json.decode(raw[6:]) for raw in shown.split(b"\n\n")[:-2]]
    choices = [body["choices"][0] for body in bodies if body["choices"]]
    pieces = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
    return {
        "text": "".join(pieces),
        "ends": [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]],
        "usage": [body["usage"] for body in bodies if body.get("usage")],
        "heads": {(body["id"], body["object"], body["created"], body["model"]) for body in bodies},
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", ())],
        "ids": [choice["token_ids"] for choice in choices if choice.get("token_ids")],
    }


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_that_was_cut_anywhere_is_the_undisturbed_one(is_chat: bool) -> None:
    num_moved = num_stopped = 0
    for seed in range(500):
        rng = random.Random(seed)
        script, body = random_script(rng), random_body(rng, is_chat=is_chat)
        deaths = [rng.randint(0, 12) for _ in range(rng.randint(1, 4))]
        whole = seen(asyncio.run(run(script, body, [], is_chat=is_chat)))
        cut = seen(asyncio.run(run(script, body, deaths, is_chat=is_chat)))
        assert cut == whole, (seed, script, body, deaths)
        num_moved += len(script.pieces) > deaths[0] > 1
        num_stopped += whole["ends"][0][1] is not None
    assert num_moved > 100
    assert num_stopped > 30


def test_several_tokens_in_an_event_change_only_a_count() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        script, body = random_script(rng), random_body(rng, is_chat=True)
        deaths, merged = [rng.randint(0, 6) for _ in range(2)], rng.randint(2, 5)
        whole = seen(asyncio.run(run(script, body, [], is_chat=True, merged=merged)))
        cut = seen(asyncio.run(run(script, body, deaths, is_chat=True, merged=merged)))
        usage, cut_usage = whole.pop("usage")[0], cut.pop("usage")[0]
        assert cut == whole, (seed, script, body, deaths)
        over = cut_usage["completion_tokens"] - usage["completion_tokens"]
        assert 0 <= over < merged
        assert over == 0 or whole["ends"][0][1] is not None


def follow_all(ledger: StreamLedger, events: bytes) -> bytes:
    shown = b""
    while events:  # it leaves what would take long to the next call
        part, _, _, num_bytes = ledger.follow(events)
        shown, events = shown + part, events[num_bytes:]
    return shown


def test_the_client_sees_no_token_ids_unless_it_asked_for_them() -> None:
    script = Script([b"a", "é".encode()[:1], "é".encode()[1:], b'"token_ids":[1]'])
    raws = list(events(script, {"return_token_ids": True, "max_tokens": 9}, is_chat=True))
    plain = list(events(script, {"max_tokens": 9}, is_chat=True))
    hidden, shown = new_ledger(is_chat=True), new_ledger(is_chat=True, shows_ids=True)
    assert ([hidden.follow(raw)[0] for raw in raws], [shown.follow(raw)[0] for raw in raws]) == (plain, raws)
    at_once = new_ledger(is_chat=True)
    assert (follow_all(at_once, b"".join(raws)), at_once.output_ids) == (b"".join(plain), hidden.output_ids)
    assert list(hidden.output_ids) == list(shown.output_ids) == script.ids
    assert (list(hidden.prompt_ids or ()), hidden.text) == (PROMPT_IDS, 'aé"token_ids":[1]')


def joint_of(shown: str, *, held: int = 0, output: list[int] | None = None) -> Any:
    script = Script([b"ab", b"c", "é".encode()[:1], "é".encode()[1:]])
    return asyncio.run(find_joint(PROMPT_IDS, script.ids if output is None else output, shown, held, decoder(script)))


def test_the_joint_is_after_the_last_whole_character() -> None:
    script = Script([b"ab", b"c", "é".encode()[:1], "é".encode()[1:]])
    assert (joint_of("abcé").num_kept, joint_of("abc", output=script.ids[:3]).num_kept) == (4, 2)
    assert joint_of("ab", held=1, output=script.ids[:3]).pending == "c"


@pytest.mark.parametrize(
    ("shown", "held"),
    [
        ("", 0),  # the engine holds text back, as a parser of reasoning does
        ("ab", 0),
        ("a", 2),
        ("abX", 0),
        ("abcéd", 9),
    ],
)
def test_text_that_is_not_that_of_the_tokens_has_no_joint(shown: str, held: int) -> None:
    with pytest.raises(CannotContinue, match="text is not that of its tokens"):
        joint_of(shown, held=held)


def test_a_prompt_that_ends_within_a_character_has_no_joint() -> None:
    script = Script([b"\xf0\x9f", b"\x99\x82"])
    with pytest.raises(CannotContinue, match="within a character"):
        asyncio.run(find_joint([100], [101], "", 0, decoder(script)))


BASE: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": None},
        {"n": 1, "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "none", "echo": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.3, "logit_bias": {"5": 1}},
        {"stop": ["a", "bc"], "stop_token_ids": [3], "ignore_eos": True},
        {"min_tokens": 3, "response_format": {"type": "text"}},
        {"cache_hints": [{"target": "prefix", "action": "retain"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_streams_whose_next_token_depends_on_their_tokens_alone_can_go_on(fields: dict[str, Any]) -> None:
    assert obstacle(CHAT, BASE | fields) == ""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"seed": 3}, "'seed'"),
        ({"seed": 3, "temperature": 0.5}, "'seed'"),
        ({"n": 2}, "'n'"),
        ({"n": True}, "'n'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"logprobs": 0}, "'logprobs'"),
        ({"presence_penalty": 0.1}, "'presence_penalty'"),
        ({"frequency_penalty": -1}, "'frequency_penalty'"),
        ({"tools": [{"type": "function"}]}, "'tools'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
        ({"structured_outputs": {"regex": "a"}}, "'structured_outputs'"),
        ({"echo": True}, "'echo'"),
        ({"stop": "a", "min_tokens": 2}, "'min_tokens'"),
        ({"stop": [3]}, "'stop'"),
        ({"skip_special_tokens": False}, "'skip_special_tokens'"),
        ({"some_new_option": 1}, "'some_new_option'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "more than text"),
        ({"messages": "hi"}, "more than text"),
    ],
)
def test_other_streams_say_why_they_cannot(fields: dict[str, Any], why: str) -> None:
    assert why in obstacle(CHAT, BASE | fields)


def test_completions_of_one_prompt_can_go_on_and_other_routes_cannot() -> None:
    assert obstacle(COMPLETIONS, {"prompt": "hi"}) == obstacle(COMPLETIONS, {"prompt": [1, 2]}) == ""
    for prompt in (["a"], ["a", "b"], [[1]], [], None, 3):
        assert obstacle(COMPLETIONS, {"prompt": prompt}) == "it has several prompts"
    for api in APIS:
        if api not in (CHAT, COMPLETIONS):
            assert api.path in obstacle(api, BASE)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"max_tokens": 10}, (8, None)),
        ({"max_tokens": 10, "max_completion_tokens": 5}, (3, None)),
        ({}, (95, None)),  # a context of 100 tokens has this much left after 3 + 2
        ({"max_tokens": 10, "min_tokens": 5}, (8, 3)),
        ({"max_tokens": 10, "min_tokens": 2}, (8, None)),
    ],
)
def test_limits_count_the_tokens_before_the_joint(fields: dict[str, Any], limits: tuple[int, int | None]) -> None:
    body = continued_body(CHAT, BASE | fields, [1, 2, 3], [4, 5], max_model_len=100)
    assert ((body["max_tokens"], body.get("min_tokens")), body["prompt"]) == (limits, [1, 2, 3, 4, 5])


def test_an_unlimited_completion_has_16_tokens() -> None:
    assert continued_body(COMPLETIONS, {"prompt": "a"}, [1], [2, 3], max_model_len=100)["max_tokens"] == 14


@pytest.mark.parametrize(
    ("choice", "flaw"),
    [
        ({"delta": {"content": "a"}}, "no token ids"),
        ({"delta": {"reasoning_content": "a"}, "token_ids": [1]}, "reasoning_content"),
        ({"delta": {"tool_calls": [{}]}, "token_ids": [1]}, "tool_calls"),
        ({"index": 1, "delta": {"content": "a"}, "token_ids": [1]}, "several choices"),
        ({"delta": {"content": "a"}, "token_ids": ["x"]}, "ids that are none"),
        ({"delta": {"content": "a"}, "token_ids": [-1]}, "ids that are none"),
        ({"delta": {"content": "a"}, "token_ids": 3}, "ids that are none"),
    ],
)
def test_events_with_more_than_text_and_ids_are_a_flaw(choice: dict[str, Any], flaw: str) -> None:
    ledger = new_ledger(is_chat=True)
    ledger.follow(b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n")
    assert flaw in ledger.flaw
