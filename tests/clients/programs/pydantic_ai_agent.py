"""An agent of `pydantic-ai` with one tool."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{os.environ['TANDEM_URL']}/v1", api_key=os.environ["TANDEM_KEY"])
agent = Agent(OpenAIChatModel(os.environ["TANDEM_MODEL"], provider=provider))


@agent.tool_plain
def read_note(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text()


print(agent.run_sync("Read note.txt and say what is in it.").output)
