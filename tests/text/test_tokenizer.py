from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from tandem.frontend.http.errors import ClientDisconnected
from tandem.frontend.http.text_work import work_on_text
from tandem.protocol.errors import RequestError
from tandem.text.tokenizer import MIN_THREAD_BYTES, Tokenizer, TokenizerPool

WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] == "torch" else find_spec(name, *args))
import tandem.frontend.serve_app
from tandem.text.tokenizer import Tokenizer
tokenizer = Tokenizer(sys.argv[1])
assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}], {}, "")) == "<s><user>hi"
assert "torch" not in sys.modules
"""


def test_runs_where_torch_is_not_installed(tokenizer_folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tokenizer_folder)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_chat_has_one_bos_and_plain_text_gets_one(tokenizer: Tokenizer) -> None:
    bos = tokenizer.start_id
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}], {"add_generation_prompt": True}, "")
    assert (chat.count(bos), tokenizer.encode("hi").count(bos)) == (1, 1)
    assert tokenizer.encode("hi", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("message", [{"content": "forbidden"}, {"tool_calls": [1]}])
def test_template_errors_are_the_clients(tokenizer: Tokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([{"role": "user"} | message], {})
    assert caught.value.param == "messages"


def test_token_text_keeps_a_leading_space_and_added_tokens_count(tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode(" w", add_special_tokens=False)
    assert tokenizer.token_text(token_id) == " w"
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (256 + 6 + 2, {262, 263})


@pytest.mark.parametrize(
    ("num_bytes", "thread"),
    [(0, "MainThread"), (MIN_THREAD_BYTES - 1, "MainThread"), (MIN_THREAD_BYTES, "tokenizer"), (1 << 20, "long-texts")],
)
async def test_short_texts_are_worked_on_at_once_and_long_ones_hold_up_no_others(num_bytes: int, thread: str) -> None:
    pool = TokenizerPool(1)
    request = Request({"type": "http", "method": "POST", "headers": []}, receive=asyncio.Event().wait)
    try:
        name = await work_on_text(request, pool, lambda: threading.current_thread().name, num_bytes)
        assert name.partition("_")[0] == thread
    finally:
        pool.close()


async def test_a_client_that_leaves_while_its_text_waits_takes_it_along() -> None:
    pool, may_go_on, has_left = TokenizerPool(1), threading.Event(), asyncio.Event()
    done: list[str] = []

    async def receive() -> Message:
        await has_left.wait()
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive=receive)
    try:
        running = asyncio.create_task(pool.run(may_go_on.wait, tenant="a", num_bytes=MIN_THREAD_BYTES))
        waiting = asyncio.create_task(work_on_text(request, pool, lambda: done.append("b"), MIN_THREAD_BYTES))
        await asyncio.sleep(0)
        has_left.set()
        with pytest.raises(ClientDisconnected):
            await waiting
        may_go_on.set()
        await running
        await pool.run(lambda: done.append("c"), tenant="a", num_bytes=MIN_THREAD_BYTES)
        assert done == ["c"]
    finally:
        may_go_on.set()
        pool.close()
