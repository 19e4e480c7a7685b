"""What weights in 8 bits change: next-token probabilities, greedy answers and the memory of the weights.

    python -m benchmarks.weights
    python -m benchmarks.weights --kv    # what KV in fp8 changes, with the weights as they are

All forms of the model compute the same text, the documentation of this project in pieces of 256 tokens. Perplexity is
that of the text; KL is the mean over its positions, in nats; agreement is the share of positions whose most likely
token is the same. Nothing is drawn at random. The forms of GPUs are computed here by torch, from the same weights and
rounded where their kernel rounds.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from benchmarks.common import arguments, console, print_rows, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.architecture import load_config, model_class
from tandem.engine.attention.context import StepContext
from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.interface import PagedStep
from tandem.engine.cpu.matmul import PackedWeight
from tandem.engine.cpu.ops import make_kernels
from tandem.engine.gpu.optimize import JoinedLinear, QuantizedLinear
from tandem.engine.loader import LoadedModel, load_model
from tandem.engine.products import replace_products
from tandem.engine.quantization import QUANTIZED_DTYPES, as_kv
from tandem.engine.weights import load_weights
from tandem.protocol.config import EngineConfig

_DOCS = Path(__file__).parents[1] / "docs"
_PIECE = 256  # tokens


def main() -> None:
    parser = arguments(__doc__)
    parser.option("--pieces", 40, "pieces of text", quick=2)
    parser.add_argument("--kv", action="store_true", help="compare KV in fp8, not weights")
    settings = parser.settings()
    folder = str(resolve_model(settings.model))
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])[: settings.pieces * _PIECE]
    exact = load_model(EngineConfig(model=folder, device="cpu"))
    if settings.kv:
        models = {"as loaded": exact, "as loaded, KV in fp8": replace(exact, kv_dtype=torch.float8_e4m3fn)}
    else:
        models = in_8_bits(exact, folder)
    rows = compare(models, [piece for piece in torch.split(ids, _PIECE) if len(piece) == _PIECE])
    print_rows(f"{settings.pieces} pieces of {_PIECE} tokens, {exact.kernels}", rows)
    write_result("weights", settings, {"compared": rows})


def in_8_bits(exact: LoadedModel, folder: str) -> dict[str, LoadedModel]:
    """The model as loaded, and all forms with weights in 8 bits; prints the memory of the first two."""
    exact_mib = packed_mib()
    rounded = load_model(EngineConfig(model=folder, device="cpu", weights="int8"))
    rounded_mib = packed_mib() - exact_mib
    console.print(f"weights of products: {exact_mib:.0f} MiB as loaded, {rounded_mib:.0f} MiB with int8")
    on_gpus = {f"{name} on a GPU": as_on_a_gpu(exact, folder, dtype) for name, dtype in QUANTIZED_DTYPES.items()}
    return {"as loaded": exact, "int8": rounded, **on_gpus}


class _TorchLinear(QuantizedLinear):
    """The product of a GPU's kernel: of values that are exact in float32, with sums in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out_features]"""
        sums = nn.functional.linear(x.float(), self.elements.float()) * self.scales
        return (sums if self.bias is None else sums + self.bias.float()).to(x.dtype)


def as_on_a_gpu(exact: LoadedModel, folder: str, dtype: torch.dtype) -> LoadedModel:
    """The model with the weights that it would have on a GPU."""
    config = load_config(Path(folder))
    module = load_weights(Path(folder), model_class(folder, config), config, exact.dtype, torch.device("cpu"))
    with torch.inference_mode():
        replace_products(module, make_kernels(), partial(_TorchLinear, dtype=dtype), JoinedLinear)
    return replace(exact, module=module)


def compare(models: dict[str, LoadedModel], pieces: list[Tensor]) -> list[dict[str, Any]]:
    """A row for each model: how it computes the pieces, beside the first model."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    for piece in pieces:
        scores = {name: log_probabilities(model, piece) for name, model in models.items()}
        expected = next(iter(scores.values()))
        for name, actual in scores.items():
            loss = -actual[:-1].gather(1, piece[1:, None]).mean()
            same = (expected.argmax(1) == actual.argmax(1)).float().mean()
            kl = (expected.exp() * (expected - actual)).sum(1).mean()
            sums[name] += torch.stack([loss, same, kl]) / len(pieces)
    return [
        {"weights": name, "perplexity": math.exp(loss), "same first choice": same, "KL": kl}
        for name, (loss, same, kl) in ((name, total.tolist()) for name, total in sums.items())
    ]


class _RoundedKv:
    """Attention over KV that was rounded to fp8 and widened again, as the GPU's kernels do."""

    name = "rounded"
    long_context = CpuAttention.long_context

    def __init__(self, backend: CpuAttention) -> None:
        self._backend = backend

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        context: StepContext,
        **options: Any,
    ) -> None:
        """As `AttentionBackend`."""
        key, value = (as_kv(heads, torch.float8_e4m3fn).to(heads.dtype) for heads in (key, value))
        self._backend(layer_idx, query, key, value, out, context, **options)


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
    backend = CpuAttention(torch.get_num_threads())
    with PagedStep(backend if model.kv_dtype is model.dtype else _RoundedKv(backend), context, lambda: None):
        logits: Tensor = model.module(input_ids=piece[None], position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(1)


def packed_mib() -> float:
    """Memory of all products' weights of this process."""
    gc.collect()
    weights = [one for one in gc.get_objects() if isinstance(one, PackedWeight)]
    return sum(weight.packed.numel() * weight.packed.element_size() for weight in weights) / 2**20


if __name__ == "__main__":
    main()
