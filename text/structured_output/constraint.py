"""What an output must match."""

from __future__ import annotations

from typing import NamedTuple

ANY_OBJECT = '{"type": "object"}'


class Constraint(NamedTuple):
    """The output must match this."""

    kind: str  # json, regex, choice, grammar, structural_tag, or llguidance: a grammar in llguidance's form
    text: str  # a schema, a list of choices or structural tags as JSON; otherwise the expression itself
    param: str  # the field of the request
