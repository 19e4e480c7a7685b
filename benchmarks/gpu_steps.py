"""Steps of our own engine on a GPU, beside what its memory and its matrix units can do.

    python -m benchmarks.gpu_steps

A Llama of random weights, 8B by default, is written to a temporary folder and loaded as any other model. Decode steps
are measured with CUDA graphs and without, in turns, and compared with the time that reading weights and KV once takes
at the bandwidth of a copy on this GPU. A prompt is compared with the rate of one large product of matrices. Nothing
here checks results: the engine does that at its start, and so do tests. Stands behind docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import arguments, console, print_table, write_result
from tandem.engine.engine import Engine
from tandem.engine.loader import resolve_device
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams

_QUICK = {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocab": 500, "context": 40, "prompt": 64}
_ROUNDS = 3
_SHARD_BYTES = 4 << 30


class Speed(NamedTuple):
    """What the device does at best."""

    bytes_per_s: float  # read or written
    flops: float  # of a product of matrices


class Decoding(NamedTuple):
    """The median round of one number of streams."""

    num_streams: int
    has_graphs: bool
    step_s: float
    tokens_per_s: float
    bandwidth_share: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="auto")
    for name, default in (("layers", 32), ("hidden", 4096), ("inner", 14_336), ("heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--context", type=int, default=1024, help="tokens before each stream's answer")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt that is computed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=100, help="decode steps of one round")
    settings = parser.parse_args()
    if settings.quick:
        vars(settings).update(_QUICK, streams=[1, 3], steps=4)
    device = resolve_device(settings.device)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_model(Path(folder), settings, device)
        engine = make_engine(folder, settings, device)
        speed = measure_speed(device, is_quick=settings.quick)
        decoding = [result for num in settings.streams for result in measure_decoding(engine, settings, speed, num)]
        prompt_s = measure_prompt(engine, settings)
    num_weights = sum(p.numel() for p in engine.model.module.parameters())
    num_multiplied = max(num_weights - 2 * settings.vocab * settings.hidden, 0)  # by every token of a prompt
    rate = 2 * num_multiplied * settings.prompt / prompt_s
    headings = ["streams", "graphs", "step ms", "tokens/s", "of the bandwidth"]
    rows = [(r.num_streams, r.has_graphs, r.step_s * 1e3, r.tokens_per_s, r.bandwidth_share) for r in decoding]
    print_table(f"Decoding behind {settings.context} tokens, {num_weights / 1e9:.2f} B weights", headings, rows)
    console.print(
        f"a prompt of {settings.prompt} tokens: {prompt_s * 1e3:.1f} ms, {settings.prompt / prompt_s:.0f} tokens/s, "
        f"{rate / speed.flops:.2f} of the rate of a large product; a copy moves {speed.bytes_per_s / 1e9:.0f} GB/s"
    )
    write_result("gpu_steps", settings, {"decoding": decoding, "prompt_s": prompt_s, "speed": speed})
    return 0


def write_model(folder: Path, settings: argparse.Namespace, device: torch.device) -> None:
    """Random weights in the form of a checkpoint, drawn on the device."""
    config = LlamaConfig(
        num_hidden_layers=settings.layers,
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        vocab_size=settings.vocab,
        max_position_embeddings=max(settings.context + (2 * _ROUNDS + 2) * settings.steps, settings.prompt) + 64,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    shard: dict[str, Any] = {}
    names = list(shapes)
    for name in names:
        weight = torch.randn(shapes[name].shape, dtype=torch.bfloat16, device=device) * 0.02
        shard[name] = (weight.abs() + 1 if "norm" in name else weight).cpu()
        if name == names[-1] or sum(w.numel() * 2 for w in shard.values()) > _SHARD_BYTES:
            save_file(shard, folder / f"model-{name}.safetensors", {"format": "pt"})
            shard = {}
    write_index(folder)


def write_index(folder: Path) -> None:
    """Tell transformers which file has which weight."""
    places: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def make_engine(folder: str, settings: argparse.Namespace, device: torch.device) -> Engine:
    num_tokens = max(settings.streams) * (settings.context + (2 * _ROUNDS + 2) * settings.steps) + settings.prompt
    kv_bytes = settings.layers * 2 * settings.kv_heads * (settings.hidden // settings.heads) * 2
    config = EngineConfig(
        model=folder,
        device=device.type,  # type: ignore[arg-type]
        dtype="bfloat16",
        pool_bytes=int(1.1 * num_tokens * kv_bytes) + (1 << 20),
        max_num_seqs=max(settings.streams),
        max_num_batched_tokens=max(settings.prompt, 512),
    )
    return Engine(config)


def measure_speed(device: torch.device, *, is_quick: bool) -> Speed:
    """The best of some copies and products."""
    num_bytes, size = (1 << 20, 256) if is_quick else (1 << 30, 8192)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target, matrix = torch.empty_like(source), torch.randn(size, size, dtype=torch.bfloat16, device=device)
    copy_s = min(seconds_of(lambda: target.copy_(source), device) for _ in range(5))
    product_s = min(seconds_of(lambda: matrix @ matrix, device) for _ in range(5))
    return Speed(2 * num_bytes / copy_s, 2 * size**3 / product_s)


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Time of a call and of the work that it launches."""
    synchronize(device)
    begun_at = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begun_at


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_decoding(engine: Engine, settings: argparse.Namespace, speed: Speed, num_streams: int) -> list[Decoding]:
    """Rounds with graphs and without, in turns."""
    generator = torch.Generator().manual_seed(settings.seed)
    sampling = SamplingParams(max_tokens=(2 * _ROUNDS + 2) * settings.steps, temperature=0, ignore_eos=True)
    for i in range(num_streams):
        prompt = torch.randint(3, settings.vocab, (settings.context,), generator=generator).tolist()
        engine.add(engine.make_sequence(f"{num_streams} {i}", prompt, sampling))
    sequences = list(engine.sequences.values())
    while any(sequence.num_output_tokens < 2 for sequence in sequences):
        engine.step()
    graphs = engine.runner.graphs
    kinds = [None] if graphs is None else [graphs, None]
    seconds: dict[bool, list[float]] = {kind is not None: [] for kind in kinds}
    for _ in range(_ROUNDS):
        for kind in kinds:
            engine.runner.graphs = kind
            seconds[kind is not None].append(seconds_of(lambda: run_steps(engine, settings.steps), engine.model.device))
    engine.runner.graphs = graphs
    context = (
        statistics.mean(len(sequence.token_ids) for sequence in sequences) - _ROUNDS * len(kinds) * settings.steps / 2
    )
    num_bytes = step_bytes(engine, num_streams * context)
    for sequence in sequences:
        engine.abort(sequence.request_id)
    while engine.has_work:
        engine.step()
    results = []
    for has_graphs, rounds in seconds.items():
        step_s = statistics.median(rounds) / settings.steps
        share = num_bytes / speed.bytes_per_s / step_s
        results.append(Decoding(num_streams, has_graphs, step_s, num_streams / step_s, share))
    return results


def run_steps(engine: Engine, num_steps: int) -> None:
    """Step until this many results have come."""
    num_results = 0
    while num_results < num_steps:
        num_results += len(engine.step())


def step_bytes(engine: Engine, num_kv_tokens: float) -> float:
    """What a decode step reads at least: all weights but the table of embeddings, and the KV of its sequences."""
    module: Any = engine.model.module
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    table = module.get_input_embeddings().weight
    kv = num_kv_tokens * engine.block_bytes / engine.config.block_size
    return float(weights - table.numel() * table.element_size() + kv)


def measure_prompt(engine: Engine, settings: argparse.Namespace) -> float:
    """The median time until a prompt's first token is there."""
    generator = torch.Generator().manual_seed(settings.seed)

    def compute() -> None:
        prompt = torch.randint(3, settings.vocab, (settings.prompt,), generator=generator).tolist()
        engine.add(engine.make_sequence("prompt", prompt, SamplingParams(max_tokens=1, temperature=0)))
        while engine.has_work:
            engine.step()

    return statistics.median(seconds_of(compute, engine.model.device) for _ in range(_ROUNDS))


if __name__ == "__main__":
    sys.exit(main())
