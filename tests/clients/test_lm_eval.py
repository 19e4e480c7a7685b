"""lm-eval scores prompts through the server and through plain transformers, with the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cluster.model_store import resolve_model, served_name
from tandem.protocol.config import DEFAULT_MODEL
from tests.clients.conftest import KEY, PYTHON
from tests.clients.lm_eval_task import TASK, compare, evaluate, make_items
from tests.support.server import Server

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the items are made from documentation, which warns
]

NUM_ITEMS = 12


def test_a_task_scores_as_transformers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in make_items(NUM_ITEMS)))
    (tmp_path / "standard_library.yaml").write_text(TASK.format(items=items))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "*")
    model = str(resolve_model(DEFAULT_MODEL))
    lm_eval = str(PYTHON.parent / "lm_eval")
    plain, expected = evaluate(lm_eval, tmp_path, "plain", "hf", f"pretrained={model},dtype=float32")
    told = f"base_url={server.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
    told += f",model={served_name(model)},num_concurrent=4"
    metrics, answers = evaluate(lm_eval, tmp_path, "served", "local-completions", told)
    found = compare(answers, expected)
    print(metrics, found)
    assert metrics == plain
    assert (found["choices"], found["other greedy"]) == (4 * NUM_ITEMS, 0)
    assert found["relative"] < 1e-4
