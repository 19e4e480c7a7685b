"""A multiple-choice task for lm-eval, run with any of its models, and two results of it compared item by item.

Items are sentences of the standard library's documentation: which of four comes next.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
