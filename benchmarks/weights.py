"""What int8 weights change: next-token probabilities, greedy answers and the memory of the weights.

    python -m benchmarks.weights

Both forms of the model compute the same text, the documentation of this project in pieces of 256 tokens. Perplexity is
that of the text; KL is the mean over its positions, in nats; agreement is the share of positions whose most likely
token is the same. Nothing is drawn at random.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import arguments, console, print_rows, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.attention.context import StepContext
from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.interface import PagedStep
from tandem.engine.cpu.matmul import PackedWeight
from tandem.engine.loader import LoadedModel, load_model
from tandem.protocol.config import EngineConfig

_DOCS = Path(__file__).parents[1] / "docs"
_PIECE = 256  # tokens


def main() -> None:
    parser = arguments(__doc__)
    parser.option("--pieces", 40, "pieces of text", quick=2)
    settings = parser.settings()
    folder = str(resolve_model(settings.model))
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])[: settings.pieces * _PIECE]
    exact = load_model(EngineConfig(model=folder, device="cpu"))
    exact_mib = packed_mib()
    rounded = load_model(EngineConfig(model=folder, device="cpu", weights="int8"))
    rounded_mib = packed_mib() - exact_mib
    rows = compare(exact, rounded, [piece for piece in torch.split(ids, _PIECE) if len(piece) == _PIECE])
    print_rows(f"{settings.pieces} pieces of {_PIECE} tokens, {exact.kernels}", rows)
    console.print(f"weights of products: {exact_mib:.0f} MiB as loaded, {rounded_mib:.0f} MiB with int8")
    write_result("weights", settings, {"compared": rows})


def compare(exact: LoadedModel, rounded: LoadedModel, pieces: list[Tensor]) -> list[dict[str, Any]]:
    losses, same, kl = {"as loaded": 0.0, "int8": 0.0}, 0.0, 0.0
    for piece in pieces:
        expected, actual = (log_probabilities(model, piece) for model in (exact, rounded))
        for name, scores in zip(losses, (expected, actual), strict=True):
            losses[name] -= float(scores[:-1].gather(1, piece[1:, None]).mean()) / len(pieces)
        same += float((expected.argmax(1) == actual.argmax(1)).float().mean()) / len(pieces)
        kl += float((expected.exp() * (expected - actual)).sum(1).mean()) / len(pieces)
    compared = {"as loaded": (1.0, 0.0), "int8": (same, kl)}
    return [
        {"weights": name, "perplexity": math.exp(losses[name]), "same first choice": share, "KL": divergence}
        for name, (share, divergence) in compared.items()
    ]


@torch.inference_mode()
def log_probabilities(model: LoadedModel, piece: Tensor) -> Tensor:
    """[T, vocab] in float32, by the engine's own attention over a pool of one block."""
    context = StepContext.of_one_sequence(
        len(piece),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
    )
    positions = torch.arange(len(piece))[None]
    with PagedStep(CpuAttention(torch.get_num_threads()), context, lambda: None):
        logits: Tensor = model.module(input_ids=piece[None], position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(1)


def packed_mib() -> float:
    """Memory of all products' weights of this process."""
    gc.collect()
    weights = [one for one in gc.get_objects() if isinstance(one, PackedWeight)]
    return sum(weight.packed.numel() * weight.packed.element_size() for weight in weights) / 2**20


if __name__ == "__main__":
    main()
