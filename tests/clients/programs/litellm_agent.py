"""LiteLLM's bridge, as its proxy has it: a conversation of the Messages API becomes requests of OpenAI's API."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import litellm

MODEL = {
    "model": f"openai/{os.environ['TANDEM_MODEL']}",
    "api_base": f"{os.environ['TANDEM_URL']}/v1",
    "api_key": os.environ["TANDEM_KEY"],
    "max_tokens": 200,
}
TOOL = {
    "name": "read_note",
    "description": "The text of a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def read_note(path: str) -> str:
    return Path(path).read_text()


async def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answer = await litellm.anthropic.messages.acreate(messages=messages, tools=[TOOL], **MODEL)
    return list(answer["content"])


async def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read note.txt and say what is in it."}]
    content = await ask(messages)
    [call] = [block for block in content if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": read_note(**call["input"])}
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    print((await ask(messages))[-1]["text"])


asyncio.run(main())
