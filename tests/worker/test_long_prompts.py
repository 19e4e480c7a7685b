"""Packed prompts: their answers and errors are those of other prompts, while the loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.digest import token_bytes
from tandem.protocol.errors import RequestError
from tandem.protocol.messages import (
    CANCELLED,
    INVALID_REQUEST,
    Cancel,
    Fork,
    Generate,
    Hello,
    RequestFailed,
    StepOutput,
    router_to_worker,
)
from tandem.protocol.sampling import SamplingParams
from tandem.worker.long_prompts import unpacked
from tandem.worker.loop import Worker
from tests.support.cluster_harness import Client, Oracle, make_prompt, running_cluster
from tests.support.waiting import eventually, until

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    with contextlib.closing(Client(worker)) as client:
        client.send(Hello(router_id="r"))
        yield client


def check_serves_on(worker: Worker, client: Client) -> None:
    """The worker answers another prompt, and holds nothing afterwards."""
    client.send(packed("good", make_prompt(40)))
    answers(client, "good")
    worker.call(lambda: worker.check_integrity(idle=True))


def hold(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep prompts in the worker's thread until the event is set."""
    prompts, may_go_on = worker.parts.long_prompts, threading.Event()
    check = prompts._check

    def held(request: Any) -> Any:
        assert may_go_on.wait(30.0)
        return check(request)

    monkeypatch.setattr(prompts, "_check", held)
    return may_go_on


def packed(name: str, token_ids: list[int], **fields: Any) -> Generate:
    return Generate(request_id=name, packed_ids=token_bytes(token_ids), sampling=GREEDY, **fields)


def answers(client: Client, *names: str) -> dict[str, tuple[list[int], int]]:
    """Tokens of these answers, and how many of the prompt's tokens were cached."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    num_cached, num_open = dict.fromkeys(names, 0), len(names)
    while num_open:
        for delta in client.receive(StepOutput).deltas:
            tokens[delta.request_id] += delta.token_ids
            num_cached[delta.request_id] += delta.num_cached_tokens or 0
            num_open -= delta.finish_reason is not None
    return {name: (tokens[name], num_cached[name]) for name in names}


@given(st.lists(st.integers(0, 99), max_size=300))
def test_ids_are_unpacked_as_they_were(token_ids: list[int]) -> None:
    assert unpacked(token_bytes(token_ids), 100).tolist() == token_ids
    with pytest.raises(RequestError, match="token id 100: this model's are 0 to 99"):
        unpacked(token_bytes([*token_ids, 100]), 100)


@pytest.mark.cluster
def test_a_packed_prompt_finds_the_blocks_of_the_same_list_and_no_others(client: Client, oracle: Oracle) -> None:
    prompt = make_prompt(100)
    client.send(Generate(request_id="list", token_ids=prompt, sampling=GREEDY))
    first = answers(client, "list")["list"]
    client.send(packed("packed", prompt))
    client.send(packed("salted", prompt, cache_salt="s"))
    client.send(packed("other", [prompt[0] ^ 1, *prompt[1:]]))
    found = answers(client, "packed", "salted", "other")
    assert first == (oracle.answer(prompt, max_tokens=4, ignore_eos=True), 0)
    assert found["packed"] == (first[0], 96)
    assert found["salted"] == first
    assert found["other"][1] == 0


@pytest.mark.cluster
def test_a_packed_prompt_with_forks_and_the_beginning_of_an_answer(client: Client, oracle: Oracle) -> None:
    prompt = make_prompt(70)
    expected = oracle.answer(prompt, max_tokens=4, ignore_eos=True)
    client.send(packed("a", prompt, forks=[Fork("b", 1)]))
    assert [tokens for tokens, _ in answers(client, "a", "b").values()] == [expected, expected]
    client.send(packed("c", prompt, output_ids=expected[:2]))
    assert answers(client, "c")["c"][0] == expected[2:]


@pytest.mark.cluster
def test_beside_a_held_prompt_others_go_on(worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold(worker, monkeypatch)
    client.send(packed("long", make_prompt(100)))
    client.send(Generate(request_id="short", token_ids=[5] * 20, sampling=GREEDY))
    answers(client, "short")
    assert worker.call(worker.status).request_ids == {"long"}
    with pytest.raises(AssertionError, match="1 long prompts are being hashed"):
        worker.call(lambda: worker.check_integrity(idle=True))
    may_go_on.set()
    answers(client, "long")
    worker.call(lambda: worker.check_integrity(idle=True))


@pytest.mark.cluster
def test_a_cancel_overtakes_a_held_prompt(worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold(worker, monkeypatch)
    client.send(packed("a", make_prompt(100), forks=[Fork("b", 1)]))
    client.send(Cancel(request_id="a", is_confirmed=True))
    assert client.receive(RequestFailed).code == CANCELLED
    client.send(packed("a", make_prompt(50)))  # its blocks are not given back yet
    assert "in use" in client.receive(RequestFailed).message
    may_go_on.set()
    assert len(answers(client, "b")["b"][0]) == 4, "another answer to the prompt goes on"
    worker.call(lambda: worker.check_integrity(idle=True))


@pytest.mark.cluster
def test_a_lost_router_leaves_no_held_prompt(worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold(worker, monkeypatch)
    client.send(packed("a", make_prompt(100)))
    until(lambda: worker.call(worker.status).request_ids)
    worker.call(lambda: worker.obey("k" * 40))
    assert not worker.call(worker.status).request_ids
    may_go_on.set()
    until(lambda: worker.call(lambda: not worker.parts.long_prompts.has("a")))
    worker.call(lambda: worker.check_integrity(idle=True))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"packed_ids": token_bytes([5, 10**6])}, INVALID_REQUEST, "token id 1000000: this model's are 0 to 255"),
        ({"packed_ids": token_bytes([5] * 600)}, "context_length_exceeded", "the prompt has 600 tokens"),
        ({"packed_ids": b"12345"}, "worker_failed", "5 bytes, which are not ids of 4 bytes"),
        ({"packed_ids": b"1234", "token_ids": [5]}, "worker_failed", "not in both"),
        ({"packed_ids": [5]}, "worker_failed", "Expected `bytes`"),
    ],
    ids=["no such token", "too long", "truncated", "twice", "list"],
)
def test_a_wrong_prompt_is_named(worker: Worker, client: Client, wrong: dict[str, Any], code: str, text: str) -> None:
    client.send_raw({"type": "Generate", "request_id": "bad", "sampling": {"max_tokens": 4}, **wrong})
    failed = client.receive(RequestFailed)
    assert (failed.request_id, failed.code) == ("bad", code)
    assert text in failed.message
    check_serves_on(worker, client)


@pytest.mark.cluster
def test_an_error_in_the_thread_ends_only_its_request(worker: Worker, client: Client) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.parts.long_prompts, "_check", fail)
        client.send(packed("bad", make_prompt(40)))
        failed = client.receive(RequestFailed)
    assert (failed.request_id, failed.code) == ("bad", "internal_error")
    check_serves_on(worker, client)


@pytest.mark.cluster
@pytest.mark.parametrize("late", ["", "p", "d"])
async def test_a_pair_answers_packed_prompts_as_one_engine_does(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setattr(router_to_worker, "LONG_PROMPT_TOKENS", 8)
    async with running_cluster(tiny_model) as cluster:
        for length in (9, 64, 333):
            prompt = make_prompt(length)
            with pytest.MonkeyPatch.context() as patch:
                may_go_on = hold(cluster.worker(late), patch) if late else threading.Event()
                answering = asyncio.ensure_future(cluster.generate(prompt, max_tokens=20, ignore_eos=True))
                if late:  # the other worker has begun before it
                    other = cluster.worker("d" if late == "p" else "p").parts
                    await eventually(lambda other=other: other.prefill.num_open + other.decode.num_open)
                may_go_on.set()
                answer = await answering
            assert answer.token_ids == oracle.answer(prompt, max_tokens=20, ignore_eos=True)
        assert cluster.flow.num_handoffs == 3
        await cluster.becomes_idle()
