import asyncio

from tandem.loadtest.client import MeasuringClient
from tandem.loadtest.closed_loop import ChatLoad, run_chats, run_completions
from tandem.loadtest.prompts import random_prompts
from tests.support.fake_openai import FakeServer


def prompts_of(server: FakeServer, seed: int = 0) -> list[list[int]]:
    client = MeasuringClient(server.url)
    return asyncio.run(random_prompts(client, model="m", num_prompts=3, num_tokens=7, seed=seed))


def test_prompts_have_the_exact_length_and_follow_the_seed(server: FakeServer) -> None:
    prompts = prompts_of(server)
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert prompts == prompts_of(server)
    assert prompts != prompts_of(server, seed=1)
    assert max(max(prompt) for prompt in prompts) < 20, "tokens of the server's tokenizer: lengths of words"


def test_prompts_are_random_ids_if_the_server_has_no_tokenizer(server: FakeServer) -> None:
    server.has_tokenize = False
    assert [len(prompt) for prompt in prompts_of(server)] == [7, 7, 7]


def test_closed_loop_keeps_the_concurrency(server: FakeServer) -> None:
    done: list[None] = []
    run = asyncio.run(
        run_completions(
            MeasuringClient(server.url),
            [[1, 2]] * 9,
            model="m",
            output_tokens=4,
            concurrency=3,
            on_done=lambda: done.append(None),
        )
    )
    assert [timing.error for timing in run.timings] == [""] * 9
    assert server.max_running <= 3
    assert len(done) == 9
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 for body in server.requests)


def test_conversations_resend_their_history(server: FakeServer) -> None:
    load = ChatLoad(num_sessions=2, num_turns=3, words_per_turn=5, output_tokens=2)
    run = asyncio.run(run_chats(MeasuringClient(server.url), load, model="m", concurrency=1))
    assert [timing.error for timing in run.timings] == [""] * 6
    first, second, third = (body["messages"] for body in server.requests[:3])
    assert [len(first), len(second), len(third)] == [1, 3, 5]
    assert second[:2] == [*first, {"role": "assistant", "content": "word word "}]
    assert server.requests[3]["messages"] != first, "every session has words of its own"


def test_a_conversation_ends_with_its_first_error(server: FakeServer) -> None:
    server.status = 500
    load = ChatLoad(num_sessions=1, num_turns=3)
    run = asyncio.run(run_chats(MeasuringClient(server.url), load, model="m", concurrency=1))
    assert len(run.timings) == 1
