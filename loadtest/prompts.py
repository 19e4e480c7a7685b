"""Prompts for measuring: random words, cut to an exact number of tokens by the server's own tokenizer.

Prompts differ from their first token on, so that a prefix cache helps only where a test intends it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem.loadtest.client import MeasuringClient

_VOCABULARY = (
    "river stone window paper garden market engine letter winter summer bridge copper silver forest island mountain "
    "station village harbour lantern mirror kitchen pencil button circle corner number signal shadow morning evening "
    "journey teacher doctor painter sailor farmer builder writer singer baker open close carry follow answer measure "
    "gather divide repeat travel remember notice explain prepare choose arrive return quiet narrow gentle bright heavy "
    "simple common early distant sudden green yellow seven twelve fifty thousand before after between under above"
)
_WORDS = _VOCABULARY.split()

# Any model with a few thousand tokens has these ids, and its special tokens are below them.
_PLAIN_TOKEN_IDS = range(1000, 4000)


async def random_prompts(
    client: MeasuringClient, *, model: str, num_prompts: int, num_tokens: int, seed: int
) -> list[list[int]]:
    """Prompts of exactly `num_tokens` token ids each: words if the server has /tokenize, else random ids."""
    rng = random.Random(seed)
    try:
        return [await _tokenized(client, model, rng, num_tokens) for _ in range(num_prompts)]
    except OSError:
        return [rng.choices(_PLAIN_TOKEN_IDS, k=num_tokens) for _ in range(num_prompts)]


def random_text(rng: random.Random, num_words: int) -> str:
    """Words of a small vocabulary; most words are one or two tokens."""
    return " ".join(rng.choices(_WORDS, k=num_words))


def random_messages(rng: random.Random, history: Sequence[dict[str, str]], num_words: int) -> list[dict[str, str]]:
    """The history and one more user turn."""
    return [*history, {"role": "user", "content": f"{random_text(rng, num_words)}. Write a story with these words."}]


async def _tokenized(client: MeasuringClient, model: str, rng: random.Random, num_tokens: int) -> list[int]:
    """Token ids of `num_tokens` random words, which are at least as many tokens, cut to that number."""
    reply = await client.request_json(
        "POST", "/tokenize", {"model": model, "prompt": random_text(rng, num_tokens), "add_special_tokens": False}
    )
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list) or len(tokens) < num_tokens:
        raise OSError("POST /tokenize did not answer with the tokens")
    return [int(token) for token in tokens[:num_tokens]]
