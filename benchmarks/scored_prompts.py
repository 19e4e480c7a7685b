"""Scored prompts: an lm-eval task against servers and against plain transformers, item by item, in float32.

    python -m benchmarks.scored_prompts --lm-eval VENV/bin/lm_eval

`lm_eval[api]`, torch and transformers are installed in an environment of their own. Items are sentences of the standard
library's documentation: which of four comes next. Only lm-eval's own code asks and scores, on both sides.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import COLOCATED, ONE_PAIR_ALWAYS, arguments, print_table, serving, write_result
from tandem.cluster.model_store import resolve_model

MODULES = (
    "argparse asyncio collections datetime decimal difflib email functools http inspect json logging pathlib random"
)
MODULES += " shutil socket sqlite3 statistics string subprocess tarfile textwrap threading typing unittest zipfile"
TASK = """task: standard_library
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
Answers = list[list[tuple[float, bool]]]  # of each item and choice: log-likelihood, and whether it is the greedy one
MIN_CHARS, MAX_CHARS = 40, 160  # of a sentence


def sentences(text: str) -> list[str]:
    """Its sentences, each on one line."""
    return re.split(r"(?<=[.])\s+(?=[A-Z])", " ".join(text.split()))


def documentation() -> Iterator[list[str]]:
    """The sentences of each documented function and class, in a fixed order."""
    seen = set()
    for module in map(importlib.import_module, MODULES.split()):
        for _, thing in sorted(vars(module).items()):
            is_documented = inspect.isclass(thing) or inspect.isroutine(thing)
            text = (inspect.getdoc(thing) or "") if is_documented else ""
            if text and text not in seen:
                seen.add(text)
                yield sentences(text)


def make_items(number: int) -> list[dict[str, Any]]:
    """Items of a sentence and four others, one of which followed it."""
    source = random.Random(0)
    pairs = [
        pair
        for text in documentation()
        for pair in itertools.pairwise(text)
        if all(MIN_CHARS <= len(one) <= MAX_CHARS for one in pair)
    ]
    items = []
    for context, answer in source.sample(pairs, number):
        choices = [answer, *(other for _, other in source.sample(pairs, 4) if other != answer)][:4]
        source.shuffle(choices)
        items.append({"context": context, "choices": [f" {one}" for one in choices], "answer": choices.index(answer)})
    return items


def evaluate(lm_eval: str, folder: Path, side: str, model: str, model_args: str) -> tuple[dict[str, float], Answers]:
    """Run the task with one of lm-eval's models: its metrics, and (log-likelihood, is greedy) of each choice."""
    out = folder / side
    command = [lm_eval, "--model", model, "--model_args", model_args, "--tasks", "standard_library"]
    command += ["--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "8"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    [results], [samples] = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    metrics = json.loads(results.read_text())["results"]["standard_library"]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    resps = [[(float(one), str(greedy) == "True") for one, greedy in row["filtered_resps"]] for row in rows]
    return {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")}, resps


def compare(served: Answers, plain: Answers) -> dict[str, float]:
    """How far two sides differ, over all choices of all items."""
    pairs = [pair for item in zip(served, plain, strict=True) for pair in zip(*item, strict=True)]
    differences = [abs(one - other) for (one, _), (other, _) in pairs]
    return {
        "choices": len(pairs),
        "largest difference": max(differences),
        "relative": max(one / abs(other) for one, (_, (other, _)) in zip(differences, pairs, strict=True)),
        "other greedy": sum(one[1] != other[1] for one, other in pairs),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lm-eval", required=True, help="the command, in an environment of its own")
    parser.add_argument("--items", type=int, default=200)
    options = parser.parse_args()
    model = str(resolve_model(options.model))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = folder / "items.jsonl"
        items.write_text(
            "".join(json.dumps(item) + "\n" for item in make_items(20 if options.quick else options.items))
        )
        (folder / "standard_library.yaml").write_text(TASK.format(items=items))
        write_result("scored_prompts", options, run(options.lm_eval, folder, model))


def run(lm_eval: str, folder: Path, model: str) -> dict[str, Any]:
    """Evaluate all sides and compare them."""
    plain, expected = evaluate(lm_eval, folder, "plain", "hf", f"pretrained={model},dtype=float32")
    result: dict[str, Any] = {"plain transformers": plain}
    for setup in (ONE_PAIR_ALWAYS, COLOCATED):
        with serving(setup, model, "--dtype=float32") as server:
            model_args = f"base_url={server.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
            model_args += f",model={server.model},num_concurrent=4"
            metrics, answers = evaluate(lm_eval, folder, setup.name.split(",")[0], "local-completions", model_args)
        result[setup.name] = metrics | compare(answers, expected)
    names = list(result[COLOCATED.name])
    rows = [[side, *(values.get(name, "") for name in names)] for side, values in result.items()]
    print_table("lm-eval", ["", *names], rows)
    return result


if __name__ == "__main__":
    main()
