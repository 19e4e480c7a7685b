import json
from pathlib import Path

import pytest

from cli.main import run
from tests.fake_openai import FakeServer


def test_writes_what_is_needed_to_repeat_the_run(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    sizes = "--concurrency 1,2 --requests 4 --input-tokens 6 --output-tokens 3 --warmup 1"
    assert run(["bench", "--url", server.url, *sizes.split(), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report.keys() == {"command", "date", "version", "commit", "machine", "settings", "results"}
    assert report["machine"]["cores"] >= 1
    assert report["settings"]["model"] == "fake-model"
    assert [result["concurrency"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        assert (result["num_requests"], result["num_errors"]) == (4, 0)
        assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (24, 12)
        assert result["itl_s"]["count"] == 8
        assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p99"]
    prompts = [tuple(body["prompt"]) for body in server.requests]
    assert len(prompts) == 10
    assert len(set(prompts)) == 10, "no prompt is sent twice, warm-up included"
    assert "TTFT" in capsys.readouterr().out


def test_chat_dataset_sends_conversations(server: FakeServer) -> None:
    sizes = "--concurrency 2 --requests 2 --turns 3 --output-tokens 2 --warmup 0"
    assert run(["bench", "--url", server.url, "--dataset", "chat", *sizes.split()]) == 0
    assert sorted(len(body["messages"]) for body in server.requests) == [1, 1, 3, 3, 5, 5]


def test_failed_requests_give_exit_code_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 500
    assert run(["bench", "--url", server.url, "--concurrency", "1", "--requests", "2"]) == 1
    assert "not today" in capsys.readouterr().out
