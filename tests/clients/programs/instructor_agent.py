"""`instructor` reads the arguments of a call as an object."""

from __future__ import annotations

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{os.environ['TANDEM_URL']}/v1", api_key=os.environ["TANDEM_KEY"], max_retries=0)


class Note(BaseModel):
    """What a note says."""

    text: str


asked = {"model": os.environ["TANDEM_MODEL"], "messages": [{"role": "user", "content": "The heron is patient."}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    note = instructor.from_openai(client, mode=mode).create(response_model=Note, max_retries=0, **asked)
    assert isinstance(note.text, str)
print(client.chat.completions.create(**asked).choices[0].message.content)
