import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem.cli import bench
from tandem.cli.bench import BenchSettings, print_summaries
from tandem.cli.main import run
from tandem.loadtest.bench_report import BenchRun, bench_report
from tandem.loadtest.client import StreamTiming
from tandem.loadtest.closed_loop import LoadRun
from tandem.loadtest.html_report import html_page, png_plots
from tandem.loadtest.stats import summarize
from tests.support.fake_openai import FakeServer


def test_bench_writes_how_to_repeat_it(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_run_is_told_when_it_has_ended(
    is_terminal: bool, server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    told: list[str] = []
    real = bench.measure

    async def measure(*args: Any) -> BenchRun:
        told.append(capsys.readouterr().err)
        return await real(*args)

    monkeypatch.setattr(bench, "measure", measure)
    sizes = "--concurrency 1,2 --requests 4 --output-tokens 3 --warmup 0"
    assert run(["bench", "--url", server.url, *sizes.split()]) == 0
    told.append(capsys.readouterr().err)
    line = r"{} at once: 4 requests in [0-9.]+ s, [0-9.]+ tok/s, TTFT p50 [0-9.]+ p99 [0-9.]+ ms, ITL p50 [0-9.]+ p99 "
    assert [[bool(re.search(line.format(level), part)) for part in told] for level in (1, 2)] == [
        [False, True, False],
        [False, False, True],
    ]


def test_a_curve_of_one_point_is_left_out_of_the_report(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = tmp_path / "report.html"
    for flags, plots in (
        (
            "--concurrency 2 --requests 4 --output-tokens 3",
            ["Time to first token", "Inter-token latency", "Output over"],
        ),
        ("--concurrency 1 --requests 1 --output-tokens 3", ["Inter-token latency", "Output over"]),
        ("--concurrency 1,2 --requests 1 --output-tokens 1", []),
    ):
        assert run(["bench", "--url", server.url, *flags.split(), "--warmup", "0", "--report", str(report)]) == 0
        page = report.read_text()
        assert re.findall('<img alt="(Time to first token|Inter-token latency|Throughput|Output over)', page) == plots
        assert "<tr><td>" in page


def test_a_narrow_screen_names_each_cell() -> None:
    page = html_page("t", {}, ["a <b>", 'TTFT "p50" ms'], [["1", "2"]], {})
    assert r'td:nth-child(1)::before { content: "a\000020\00003cb\00003e"; }' in page
    assert r'td:nth-child(2)::before { content: "TTFT\000020\000022p50\000022\000020ms"; }' in page


def test_labels_of_a_logarithmic_axis_are_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    labels: list[list[str]] = []

    def note(figure: Any, image: object, format: str) -> None:
        figure.canvas.draw()
        axis = figure.axes[0].xaxis
        texts = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
        low, high = axis.get_view_interval()
        places = [*axis.get_majorticklocs(), *axis.get_minorticklocs()]
        labels.append(
            sorted(
                (t.get_text() for t, x in zip(texts, places, strict=True) if t.get_text() and low <= x <= high),
                key=float,
            )
        )

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", note)
    for values in ([30.0, 290.0], [40.0, 90.0], [1.0, 1e4]):
        png_plots({"a": lambda axes, values=values: (axes.plot(values, [1, 2]), axes.set_xscale("log"))})  # type: ignore[misc]
    assert labels == [["50", "100", "200"], ["40", "50", "60", "70", "80", "90"], ["1", "10", "100", "1000", "10000"]]


def test_the_report_shows_every_run(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = tmp_path / "report.html"
    sizes = "--concurrency 1,2 --requests 4 --input-tokens 6 --output-tokens 3 --warmup 0"
    assert run(["bench", "--url", server.url, *sizes.split(), "--report", str(report)]) == 0
    page = report.read_text()
    assert page.count("data:image/png;base64,") == 4
    assert [page.count(f"<tr><td>{level}</td>") for level in (1, 2)] == [1, 1]
    assert "TTFT p50 ms" in page


def test_a_report_of_answers_that_came_as_a_whole_is_a_report() -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    timings = [
        StreamTiming(0.0, 1.0, event_times_s=[1.0, 1.0], event_tokens=[1, 1], num_output_tokens=2) for _ in range(2)
    ]
    runs = [BenchRun(concurrency, LoadRun(timings, duration_s=1.0)) for concurrency in (1, 2)]
    assert bench_report("x", {}, [], [], runs).count("data:image/png;base64,") == 4


def test_a_report_of_failed_requests_is_a_report(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    server.status = 500
    report = tmp_path / "report.html"
    sizes = "--concurrency 1 --requests 2 --warmup 0"
    assert run(["bench", "--url", server.url, *sizes.split(), "--report", str(report)]) == 1
    assert "concurrency 1: 2 errors, the first:\n  not today (HTTP 500)\n" in capsys.readouterr().out
    page = report.read_text()
    assert "<h1>Load on fake-model</h1>" in page
    assert "<dt>2 errors at 1</dt><dd>the first: not today" in page


def test_escape_sequences_do_not_reach_the_terminal(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.model = "m\x1b[2J"
    server.status, server.error = 500, {"message": "no\x1b]0;title\x07"}
    for warmup, code in ((0, 1), (1, 1)):
        assert run(["bench", "--url", server.url, "--requests", "1", "--warmup", str(warmup)]) == code
    shown = "".join(capsys.readouterr())
    assert "m\\x1b[2J" in shown
    assert "no\\x1b]0;title" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_plot_without_values_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    texts: list[list[str]] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, image, format: texts.append([text.get_text() for text in figure.axes[0].texts]),
    )
    values: list[list[float]] = [[], [float("nan")], [1.0]]
    for one in values:
        png_plots({"a": lambda axes, one=one: axes.plot(one)})  # type: ignore[misc]
    assert texts == [["no data"], ["no data"], []]


def test_a_report_needs_what_draws_it(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", "--url", server.url, "--model", "m", "--report", str(tmp_path / "report.html")]) == 2
    assert not server.requests


def test_chat_dataset_sends_conversations(server: FakeServer) -> None:
    sizes = "--concurrency 2 --requests 2 --turns 3 --output-tokens 2 --warmup 0"
    assert run(["bench", "--url", server.url, "--dataset", "chat", *sizes.split()]) == 0
    assert sorted(len(body["messages"]) for body in server.requests) == [1, 1, 3, 3, 5, 5]


def test_a_warmup_that_fails_altogether_ends_it(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 500
    assert run(["bench", "--url", server.url, "--concurrency", "1,8"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tandem: every request of the warm-up failed, the first with: not today (HTTP 500)\n"
    assert (captured.out, len(server.requests)) == ("", 2)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_has_all_digits(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    timing = StreamTiming(started_s=0.0)
    timing.event_times_s, timing.event_tokens, timing.num_output_tokens = [123.456, 143.2], [1, 15], 16
    timing.finished_s = 143.2
    summary = summarize([timing] * 2048, concurrency=1024, duration_s=2.0)
    settings = BenchSettings(
        url="", model="m", concurrency=(1,), num_requests=1, input_tokens=1, output_tokens=1, dataset="random",
        turns=1, warmup=0, seed=0,
    )  # fmt: skip
    print_summaries(settings, [summary], Console())
    output = capsys.readouterr().out
    assert "…" not in output
    row = next(line.split() for line in output.splitlines() if line.lstrip().startswith("1024"))
    assert row == ["1024", "2048", "0", "16384.0", "1024.00", "123456", "123456", "19744", "19744", "19744", "1316"]
    assert width < 80 or max(map(len, output.splitlines())) <= 80
