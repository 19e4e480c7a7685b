"""Does `tandem plan` predict from data sheets what kernels were measured to take?

NVIDIA's aiconfigurator holds measured times of vLLM's and SGLang's kernels on many GPUs, and adds them up to a prompt
and to a decode step. The same points are predicted here, without calibration. It wants an environment of its own:

    python -m venv FOLDER && FOLDER/bin/pip install aiconfigurator
    python -m benchmarks.silicon --aiconfigurator-python FOLDER/bin/python

The efficiencies of `scheduling/planning/hardware.py` were fitted to Llama 3.1 8B and 70B on H100, H200 and B200 with
vLLM; the points are of other models and lengths, and partly of other GPUs and engines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from benchmarks.common import arguments, console, print_rows, verdict, write_result
from tandem.scheduling.planning.geometry import geometry_of
from tandem.scheduling.planning.hardware import gpu_named
from tandem.scheduling.planning.roofline import plan_worker

_AIM = 0.25
_TIMEOUT_S = 1800.0
_MODELS = {"Qwen/Qwen3-32B": 2, "Qwen/Qwen3-8B": 1, "meta-llama/Meta-Llama-3.1-8B": 1}  # with their ranks
_MACHINES = (("h200", "vllm"), ("h100", "sglang"), ("a100", "vllm"), ("l40s", "vllm"), ("b200", "sglang"))
_PROMPTS = (512, 2048, 8192, 32768)
_CONTEXTS, _BATCHES = (2048, 16384), (1, 8, 32)

# Runs in the other environment: points by stdin, the same with seconds and the model's config.json by stdout.
_ASK = """
import contextlib, importlib.resources, json, sys

points = json.load(sys.stdin)
with contextlib.redirect_stdout(sys.stderr):
    from aiconfigurator.cli.api import cli_estimate

    packages = map(importlib.resources.files, ("aiconfigurator", "aiconfigurator_core"))
    configs = next(one / "model_configs" for one in packages if (one / "model_configs").is_dir())
    for point in points:
        batch = point["batch"]
        told = cli_estimate(
            point["model"],
            point["gpu"] if point["gpu"] == "l40s" else point["gpu"] + "_sxm",
            mode="static_gen" if batch else "static_ctx",
            backend_name=point["engine"],
            tp_size=point["ranks"],
            isl=point["tokens"],
            osl=2 if batch else 1,
            batch_size=batch or 1,
        )
        point["seconds"] = 1e-3 * (told.tpot if batch else told.ttft)
        point["config"] = json.loads((configs / (point["model"].replace("/", "--") + "_config.json")).read_text())
json.dump(points, sys.stdout)
"""


class Point(NamedTuple):
    """A prompt alone (`batch` 0), or a decode step of so many sequences behind so many tokens each."""

    model: str
    ranks: int
    gpu: str
    engine: str
    tokens: int
    batch: int


def main() -> int:
    parser = arguments(__doc__, model=False)
    parser.option("--aiconfigurator-python", "", "interpreter of an environment with aiconfigurator")
    settings = parser.settings()
    if not settings.aiconfigurator_python:
        console.print("give --aiconfigurator-python: see --help")
        return 2
    answers = ask(settings.aiconfigurator_python, points()[:: 30 if settings.quick else 1])
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for answer in answers:
        config = answer.pop("config")
        point = Point(**{name: answer[name] for name in Point._fields})
        answer["predicted"] = predicted_s(point, config)
        error = answer["predicted"] / answer["seconds"] - 1
        errors[point.gpu, point.engine, "decode step" if point.batch else "prompt"].append(error)
    rows = [_row(" ".join(key), found) for key, found in errors.items()]
    rows.append(_row("all", [error for found in errors.values() for error in found]))
    print_rows("tandem plan over aiconfigurator", rows, f"aim: within {_AIM:.0%}")
    write_result("silicon", settings, {"points": answers, "rows": rows})
    return 0


def points() -> list[Point]:
    """Every model on every machine: prompts, then decode steps."""
    asked = [(tokens, 0) for tokens in _PROMPTS] + list(product(_CONTEXTS, _BATCHES))
    return [
        Point(model, ranks, gpu, engine, tokens, batch)
        for (model, ranks), (gpu, engine), (tokens, batch) in product(_MODELS.items(), _MACHINES, asked)
    ]


def ask(python: str, asked: Sequence[Point]) -> list[dict[str, Any]]:
    """The points with `seconds` and `config`. Raises `CalledProcessError` if that environment fails."""
    told = subprocess.run(
        [python, "-W", "ignore", "-c", _ASK],
        input=json.dumps([point._asdict() for point in asked]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    answers: list[dict[str, Any]] = json.loads(told.stdout)
    return answers


def predicted_s(point: Point, config: dict[str, Any]) -> float:
    """What `tandem plan` takes it for."""
    worker = plan_worker(geometry_of(config, point.model), gpu_named(point.gpu), point.ranks)
    if not point.batch:
        return worker.prefill_s(point.tokens)
    return worker.costs.step_s(float(point.batch), float(point.batch * (point.tokens + 1)))


def _row(name: str, errors: list[float]) -> dict[str, Any]:
    num_within = sum(abs(error) <= _AIM for error in errors)
    return {
        "": name,
        "points": len(errors),
        "median %": 100 * statistics.median(errors),
        "least %": 100 * min(errors),
        "most %": 100 * max(errors),
        "within": num_within,
        "aim": verdict("all", num_within == len(errors)),
    }


if __name__ == "__main__":
    sys.exit(main())
