"""A tool-calling agent of `smolagents`. After its one step it answers without tools."""

from __future__ import annotations

import os
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(
    os.environ["TANDEM_MODEL"], api_base=f"{os.environ['TANDEM_URL']}/v1", api_key=os.environ["TANDEM_KEY"]
)


@tool
def read_note(path: str) -> str:
    """The text of a file.

    Args:
        path: The file.
    """
    return Path(path).read_text()


agent = ToolCallingAgent(tools=[read_note], model=model, max_steps=1)
print(agent.run("Read note.txt and say what is in it."))
