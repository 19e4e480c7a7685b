from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cli.main import run
from tests.scheduling.planning.test_learned import body, pools
from tests.support.published_models import PUBLISHED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "m", PUBLISHED["llama-8b"] | {"max_position_embeddings": 131_072})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three rounds of 20 prompts, of which the second and third round could be found."""
    path = tmp_path / "trace.jsonl"
    common = {"input_length": 1500, "output_length": 20}
    lines = [common | {"timestamp": 400 * idx, "hash_ids": [3 * (idx % 20), 3 * (idx % 20) + 1]} for idx in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Endless(httpx.SyncByteStream):
    """The body of an answer that never ends."""

    def __iter__(self) -> Iterator[bytes]:
        return itertools.repeat(b" ")


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, int], None]:
    """Makes every server answer this."""

    client = httpx.Client

    def answer(content: bytes, status: int) -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
        monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=transport, **options))

    return answer


def save(folder: Path, fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return folder


def plan(*args: object) -> int:
    return run(["plan", *map(str, args)])


def test_a_plan_is_printed_and_written(
    folder: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    args = (f"--model={folder}", "--gpu=h200", f"--trace={trace}", "--gpus=2", "--price=3.6", f"--json={output}")
    assert plan(*args) == 0
    screen, found = capsys.readouterr().out, json.loads(output.read_text())
    assert "8.03 B parameters, 16 GB of weights; KV 131,072 B a token" in screen
    assert found["verdict"] in screen.replace("\n", " ")
    assert "raise --requests" in found["facts"]["caution"], "60 requests are few"
    assert found["break_even_tokens"]["host"] == 1
    assert [one["shape"] for one in found["shapes"]] == ["2 colocated", "1P1D"]
    one = found["shapes"][0]
    tokens_per_s = one["requests_per_s"] * 20
    assert one["dollars_per_million"] == pytest.approx(2 * 3.6 / 3600 / tokens_per_s * 1e6)
    assert one["joules_per_token"] == pytest.approx(2 * 700 / tokens_per_s)
    assert found["needed"]["colocated"]["shape"] == "1 colocated"
    assert found["memory"]["hits"][0] == pytest.approx(2 / 3 * 1024 / 1500, abs=0.01)
    assert [row["num_tokens"] for row in found["contexts"]] == [1 << n for n in range(10, 21)]


def test_kv_in_fp8_takes_half_the_memory(folder: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for own in ("vllm", "tandem"):
        flags = (f"--model={folder}", "--gpu=h200", f"--trace={trace}", "--gpus=2", f"--engine={own}")
        assert plan(*flags, "--kv-cache-dtype=fp8") == 0
        assert "KV 65,536 B a token" in capsys.readouterr().out


def test_a_report_has_its_pictures_inside(folder: Path, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = tmp_path / "plan.html"
    assert plan(f"--model={folder}", "--gpu=b200", f"--trace={trace}", "--gpus=2", f"--report={report}") == 0
    page = report.read_text()
    assert page.count('src="data:image/png;base64,') == 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "P/D" in page


def test_an_slo_that_nothing_meets_says_why(folder: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (f"--model={folder}", "--gpu=a100", f"--trace={trace}", "--gpus=2", "--slo-ttft=0.01", "--slo-itl=0.001")
    assert plan(*args) == 1
    screen = capsys.readouterr().out.replace("\n", " ")
    assert "Nothing meets this SLO: at the slowest pace 0.0% of the requests do" in screen
    assert "100% of the prompts take longer than slo_ttft=0.01 s to compute alone" in screen
    assert "more than slo_itl=0.001. Raise --slo-ttft" in screen


def test_a_type_that_transformers_does_not_know_needs_only_its_fields(tmp_path: Path, trace: Path) -> None:
    fields = PUBLISHED["llama-8b"] | {"model_type": "llama-of-tomorrow"}
    wrapped = save(tmp_path / "w", {"model_type": "wrapper-of-tomorrow", "text_config": fields})
    assert plan(f"--model={wrapped}", "--gpu=h200", f"--trace={trace}", "--gpus=2") == 0


def test_learned_costs_take_the_place_of_data_sheets(
    folder: Path, trace: Path, tmp_path: Path, live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    live(body(pools(kind="cpu-9")), 200)
    common = (f"--model={folder}", "--from=http://x/v1", f"--trace={trace}", "--gpus=2", f"--json={output}")
    assert plan(*common) == 0
    found = json.loads(output.read_text())
    assert found["worker"]["costs"]["kv_token_s"] == 4e-8
    assert found["shapes"][0]["joules_per_token"] is None
    live(body(pools(kind="cpu-9 [red]\x1b[2J")), 200)
    assert plan(*common) == 0
    assert "cpu-9 [red]\\x1b[2J, learned from 900 steps" in capsys.readouterr().out
    live(body(pools(kind="cpu-9")), 200)
    assert plan(*common, "--gpu=h200") == 2
    assert "runs on 'cpu-9', whose data sheet is not known" in capsys.readouterr().err
    live(body(pools()), 200)
    assert plan(*common, "--gpu=b200") == 0
    assert json.loads(output.read_text())["worker"]["costs"]["kv_token_s"] == pytest.approx(4e-8 * 4.8 / 8.0)
    other = save(tmp_path / "other", PUBLISHED["llama-70b"] | {"max_position_embeddings": 131_072})
    assert plan(*common, f"--model={other}", f"--from-model={folder}") == 0  # the last --model counts
    assert json.loads(output.read_text())["worker"]["num_gpus"] == 2
    live(body(pools(model="another")), 200)
    assert plan(*common) == 2
    assert "serves 'another', not 'm'; name that model by --from-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{}", 404, "has no /v1/pools to read: HTTP 404"),
        (b'{"error": {"message": "Needs an operator\'s key."}}', 403, "operator's key. (HTTP 403)"),
        (b"\x00 hello", 200, "not that of this version of Tandem"),
    ],
)
def test_a_server_that_is_not_tandem_is_told(
    content: bytes, status: int, message: str, folder: Path, live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    live(content, status)
    assert plan(f"--model={folder}", "--from=http://x") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("limit", "value"), [("_READ_TIMEOUT_S", 0.2), ("_MAX_POOLS_BYTES", 1000)])
def test_a_server_that_never_ends_is_told(
    limit: str, value: float, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = httpx.Client
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Endless()))
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=transport, **options))
    monkeypatch.setattr(f"tandem.cli.plan.{limit}", value)
    assert plan(f"--model={folder}", "--from=http://x") != 0
    assert "sends its /v1/pools without end" in capsys.readouterr().err


def test_a_dead_server_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert plan(f"--model={folder}", f"--from=http://127.0.0.1:{port}") == 2
    assert "start one with: tandem serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu=abacus"], "gpu='abacus' is unknown; choose one of a100"),
        ([], "gpu='' names no accelerator; give --gpu"),
        (["--gpu=h200", "--price=0"], "price=0 must be greater than 0 and finite; leave it out"),
        (["--gpu=h200", "--slo-ttft=nan"], "slo_ttft=nan must be greater than 0"),
        (["--gpu=h200", "--slo-itl=-1"], "slo_itl=-1 must be greater than 0"),
        (["--gpu=h200", "--rate=-3"], "rate=-3 must be greater than 0"),
        (["--gpu=h200", "--gpus=0"], "gpus"),
        (["--gpu=h200", "--json=/nowhere/x.json"], "its folder does not exist"),
        (["--gpu=h200", "--trace=/nowhere.jsonl"], "trace /nowhere.jsonl cannot be read"),
        (["--gpu=h200", "--model=/nowhere/at/all"], "/nowhere/at/all does not exist"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"--model={folder}", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b"\x1f\x8b\x08garbage",
        b'{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [-5]}\n' * 2,
        b'{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": ["a"]}\n' * 2,
        b'{"timestamp": NaN, "input_length": 600, "output_length": 1, "hash_ids": []}\n' * 2,
        b'{"timestamp": 1, "input_length": -600, "output_length": 1, "hash_ids": []}\n' * 2,
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_that_is_not_a_trace_is_told(
    content: bytes, name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert plan(f"--model={folder}", "--gpu=h200", f"--trace={tmp_path / name}") == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not a valid JSON file"),
        ("[]", "is not a JSON object"),
        ("{}", "lacks num_hidden_layers"),
        ({"model_type": "t5"}, "is an encoder-decoder; plan for a decoder model"),
        ({"model_type": "of tomorrow", "hidden_size": 64}, "its config.json lacks num_hidden_layers"),
        (PUBLISHED["llama-8b"] | {"num_hidden_layers": 10**12}, "is absurd"),
        (PUBLISHED["llama-8b"] | {"hidden_size": "wide"}, "hidden_size=wide"),
        *(
            (PUBLISHED["llama-8b"] | {field: value}, "a field of its config.json cannot be read")
            for field, value in [
                ("per_layer_config", {"1": []}),
                ("text_config", -1),
                ("attribute_map", "x"),
                ("num_attention_heads", 0),
                ("dtype", float("inf")),
            ]
        ),
    ],
)
def test_a_config_that_is_none_is_told(
    config: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"--model={save(tmp_path / 'm', config)}", "--gpu=h200") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_without_a_config_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"--model={tmp_path}", "--gpu=h200") == 2
    assert "has no config.json" in capsys.readouterr().err
