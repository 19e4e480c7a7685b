from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.protocol.errors import RequestError
from tandem.router.text.tokenizer import MIN_THREAD_BYTES, Tokenizer, TokenizerPool

WITHOUT_TORCH = """
import sys
import threading
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] == "torch" else find_spec(name, *args))
import tandem.router.openai.app
from tandem.router.text.tokenizer import MIN_THREAD_BYTES, Tokenizer, TokenizerPool
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
    assert chat.count(bos) == 1
    assert tokenizer.encode("hi").count(bos) == 1
    assert tokenizer.encode("hi", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("content", ["forbidden", None])
def test_template_errors_are_the_clients(tokenizer: Tokenizer, content: str | None) -> None:
    messages = [{"role": "user", "content": content}] if content else [{"role": "user", "tool_calls": [1]}]
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(messages, {})
    assert caught.value.param == "messages"


def test_token_text_keeps_a_leading_space(tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode(" w", add_special_tokens=False)
    assert tokenizer.token_text(token_id) == " w"


def test_vocab_size_covers_added_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 256 + 6 + 2
    assert tokenizer.special_ids == {262, 263}


async def test_only_long_texts_are_worked_on_in_threads() -> None:
    pool = TokenizerPool(1)
    try:
        here = threading.get_ident()
        for num_bytes, is_here in [(0, True), (MIN_THREAD_BYTES - 1, True), (MIN_THREAD_BYTES, False)]:
            assert (await pool.run(threading.get_ident, num_bytes=num_bytes) == here) == is_here
        assert await pool.run(threading.get_ident) != here
    finally:
        pool.close()
