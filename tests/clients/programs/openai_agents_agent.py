"""An agent of `openai-agents` with one tool, by the Responses API."""

from __future__ import annotations

import os
from pathlib import Path

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{os.environ['TANDEM_URL']}/v1", api_key=os.environ["TANDEM_KEY"], max_retries=0)


@function_tool
def read_note(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text()


model = OpenAIResponsesModel(os.environ["TANDEM_MODEL"], client)
reader = Agent(name="reader", instructions="Read what is asked for.", model=model, tools=[read_note])
print(Runner.run_sync(reader, "Read note.txt and say what is in it.").final_output)
