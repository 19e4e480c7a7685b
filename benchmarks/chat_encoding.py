"""Time to encode each turn of a growing chat: whole, and only what is new; and whether the ids are the same.

python -m benchmarks.chat_encoding [--model NAME]
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from benchmarks.common import arguments, console, ms, print_table, write_result
from tandem.cluster.model_store import resolve_model
from tandem.protocol.digest import CacheScope
from tandem.text.tokenizer import Tokenizer

_NUM_TURNS = 20
_WORDS = ("the", "pier", "wind", "boat", "turned", "nobody", "saw,", "on", "42", "gulls;", "über-Möwen", "日本", "!?")


def main() -> None:
    parser = arguments(__doc__)
    settings = parser.parse_args()
    num_chats = 2 if settings.quick else 20
    tokenizer = Tokenizer(resolve_model(settings.model))
    rng = random.Random(settings.seed)
    lengths: list[list[int]] = [[] for _ in range(_NUM_TURNS)]
    whole_s, turn_s, render_s = (_times(), _times(), _times())
    num_different = 0
    for _ in range(num_chats):
        messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng, 200)}]
        for turn in range(_NUM_TURNS):
            messages.append({"role": "user", "content": _text(rng, 60)})
            options = {"add_generation_prompt": True}
            started_s = time.perf_counter()
            text = tokenizer.render_chat(messages, options)
            rendered_s = time.perf_counter()
            whole = tokenizer.encode(text, add_special_tokens=False)
            encoded_s = time.perf_counter()
            ids = tokenizer.encode_chat(messages, options, CacheScope(""))
            turn_s[turn].append(time.perf_counter() - encoded_s)
            whole_s[turn].append(encoded_s - rendered_s)
            render_s[turn].append(rendered_s - started_s)
            lengths[turn].append(len(ids))
            num_different += ids != whole
            messages.append({"role": "assistant", "content": _text(rng, 150)})
    rows, found = [], []
    for turn in range(_NUM_TURNS):
        template, encode, both = (statistics.median(values[turn]) for values in (render_s, whole_s, turn_s))
        one = {"turn": turn + 1, "num_tokens": statistics.median(lengths[turn]), "template_s": template}
        found.append(one | {"whole_s": template + encode, "new_part_s": both})
        if turn in (0, 1, 4, 9, 19):
            rows.append([turn + 1, int(one["num_tokens"]), ms(template), ms(template + encode), ms(both)])
    print_table("ms for a turn, template included", ["turn", "tokens", "template", "whole", "new part"], rows)
    console.print(f"{num_different} of {num_chats * _NUM_TURNS} turns have other ids than the whole text")
    write_result("chat_encoding", settings, {"turns": found, "num_different": num_different})


def _times() -> list[list[float]]:
    return [[] for _ in range(_NUM_TURNS)]


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


if __name__ == "__main__":
    main()
