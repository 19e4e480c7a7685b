"""What int8 weights change: next-token probabilities, greedy answers and the memory of the weights.

    python -m benchmarks.weights

Both forms of the model compute the same text, the documentation of this project in pieces of 256 tokens. Perplexity is
that of the text; KL is the mean over its positions, in nats; agreement is the share of positions whose most likely
token is the same. Nothing is drawn at random.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import arguments, print_table, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.attention.context import StepContext
from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.interface import PagedStep
from tandem.engine.cpu.parts import PackedLinear
from tandem.engine.loader import LoadedModel, load_model
from tandem.protocol.config import EngineConfig

_DOCS = Path(__file__).parents[1] / "docs"
_PIECE = 256  # tokens


class Compared(NamedTuple):
    """One form of the weights beside the one that was loaded."""

    weights: str
    mib: float
    perplexity: float
    agreement: float
    kl: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--pieces", type=int, default=40, help="pieces of text")
    settings = parser.parse_args()
    pieces = 2 if settings.quick else settings.pieces
    folder = str(resolve_model(settings.model))
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    exact, rounded = (
        load_model(EngineConfig(model=folder, device="cpu", weights=one)) for one in ("as-loaded", "int8")
    )
    rows = list(compare(exact, rounded, [piece for piece in ids.split(_PIECE) if len(piece) == _PIECE][:pieces]))
    headings = ["weights", "MiB", "perplexity", "same first choice", "KL"]
    print_table(f"{pieces} pieces of {_PIECE} tokens, {exact.kernels}", headings, rows)
    write_result("weights", settings, {"compared": rows})
    return 0


def compare(exact: LoadedModel, rounded: LoadedModel, pieces: list[Tensor]) -> Iterator[Compared]:
    losses, same, kl = {"as loaded": 0.0, "int8": 0.0}, 0.0, 0.0
    for piece in pieces:
        expected, actual = (log_probabilities(model, piece) for model in (exact, rounded))
        for name, scores in zip(losses, (expected, actual), strict=True):
            losses[name] -= float(scores[:-1].gather(1, piece[1:, None]).mean()) / len(pieces)
        same += float((expected.argmax(1) == actual.argmax(1)).float().mean()) / len(pieces)
        kl += float((expected.exp() * (expected - actual)).sum(1).mean()) / len(pieces)
    yield Compared("as loaded", packed_mib(exact), math.exp(losses["as loaded"]), 1.0, 0.0)
    yield Compared("int8", packed_mib(rounded), math.exp(losses["int8"]), same, kl)


@torch.inference_mode()
def log_probabilities(model: LoadedModel, piece: Tensor) -> Tensor:
    """[T, vocab] in float32, by the engine's own attention over a pool of one block."""
    length = len(piece)
    shape = (1, model.num_layers, 2, length, model.num_kv_heads, model.head_dim)
    context = StepContext(
        pool=torch.zeros(shape, dtype=model.dtype),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        slot_mapping=torch.arange(length),
        max_query_len=length,
        max_kv_len=length,
    )
    positions = torch.arange(length)[None]
    with PagedStep(CpuAttention(torch.get_num_threads()), context, lambda: None):
        logits: Tensor = model.module(input_ids=piece[None], position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(1)


def packed_mib(model: LoadedModel) -> float:
    """Memory of the products' weights."""
    parts = [module.packed for module in model.module.modules() if isinstance(module, PackedLinear)]
    parts += [module.product.packed.packed for module in model.module.modules() if hasattr(module, "product")]
    forwards = [vars(module).get("forward") for module in model.module.modules()]
    parts += [part.packed for one in forwards if hasattr(one, "gate_up") for part in (one.gate_up, one.down)]
    distinct = {id(part): part for part in parts}.values()
    return sum(part.packed.numel() * part.packed.element_size() for part in distinct) / 2**20


if __name__ == "__main__":
    sys.exit(main())
