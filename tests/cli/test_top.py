from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.cells import cell_len
from rich.console import Console

from tandem.cli import top
from tandem.cli.main import run
from tandem.cli.top_view import SORT_KEYS, render
from tandem.frontend.dashboard.snapshot import SnapshotBuilder
from tests.support.dashboard_world import DashboardWorld

URL = "http://127.0.0.1:8000"


def snapshot_of(world: DashboardWorld, num_requests: int = 8) -> dict[str, Any]:
    now = 0.0
    builder = SnapshotBuilder(world.overview, world.metrics.traffic, "1.2.3", clock=lambda: now)
    data = b""
    for _ in range(5):
        now += 1
        world.tick(num_requests)
        data = asyncio.run(builder.build())
    snapshot: dict[str, Any] = json.loads(data)
    return snapshot


def screen(snapshot: dict[str, Any], *, width: int = 120, height: int = 40, sort: str = "queue") -> str:
    console = Console(width=width, file=StringIO())
    with console.capture() as captured:
        console.print(render(snapshot, url=URL, sort=sort, width=width, height=height))
    return captured.get()


def events(*snapshots: dict[str, Any]) -> bytes:
    return b"".join(b"event: snapshot\ndata: %b\n\n" % json.dumps(one).encode() for one in snapshots)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[httpx.Response | Callable[[], httpx.Response]]]:
    """What the server answers, in turn."""
    queue: list[httpx.Response | Callable[[], httpx.Response]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/dashboard"
        response = queue.pop(0)
        return response() if callable(response) else response

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=httpx.MockTransport(answer), **options))
    yield queue
    assert queue == []


def test_what_other_strategies_would_have_cost_is_shown_most_expensive_first() -> None:
    world = DashboardWorld(2)
    assert "would lose" not in screen({**snapshot_of(world), "shadow": {}})
    shown = screen(snapshot_of(world))
    assert re.search(r"a request would lose with  round-robin \d+ ms, kv 20 ms\n", shown), shown


@pytest.mark.parametrize("sort", SORT_KEYS)
def test_two_workers_and_two_hundred_fit_a_screen(sort: str) -> None:
    few, many = (screen(snapshot_of(DashboardWorld(count)), sort=sort, height=44) for count in (2, 200))
    assert len(few.splitlines()) < len(many.splitlines()) <= 44
    assert "prefill-0" in few
    assert f"of 200 by {sort}" in many


def test_a_narrow_terminal_gets_every_number_whole() -> None:
    snapshot = snapshot_of(DashboardWorld(2))
    wide, narrow = screen(snapshot, width=200), screen(snapshot, width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    for pool in snapshot["pools"].values():
        assert f"{pool['queued_tokens']:,}" in wide
        assert f"{pool['queued_tokens']:,}" in narrow
    for tier in snapshot["tiers"]:
        assert f"{tier['capacity_blocks']:,}" in narrow


@pytest.mark.parametrize("num_workers", [0, 2, 200])
def test_every_size_of_a_terminal_is_kept_to(num_workers: int) -> None:
    """No line wraps, and what matters most is on the smallest screen."""
    world = DashboardWorld(max(num_workers, 2), names=[f"a-rather-long-name-{i}" for i in range(max(num_workers, 2))])
    world.fill(1)
    snapshot = snapshot_of(world) if num_workers else snapshot_of(DashboardWorld(0, tenants=()), num_requests=0)
    for width, height in itertools.product([1, 20, 40, 60, 80, 81, 132, 300], [1, 5, 10, 16, 24, 25, 50, 400]):
        lines = screen(snapshot, width=width, height=height).splitlines()
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        if num_workers and width >= 40 and height >= 10:
            assert any(re.match("prefill +[0-9]+/[0-9]+ ", line) for line in lines), lines
            assert any(line.startswith("a-rather-lo") for line in lines[-height:]), lines


@pytest.mark.parametrize("size", [(80, 24), (40, 10)])
def test_a_standard_terminal_cuts_no_number(size: tuple[int, int]) -> None:
    snapshot = snapshot_of(DashboardWorld(200), num_requests=60)
    prefill = snapshot["pools"]["prefill"]
    shown = screen(snapshot, width=size[0], height=size[1])
    (line,) = [line for line in shown.splitlines() if line.startswith("prefill ")]
    assert line.split()[1] == f"{prefill['num_ready']}/{prefill['num_workers']}"
    assert f"{prefill['running']:,}/{prefill['seats']:,}" in line
    assert "…" not in line
    if size[0] == 80:
        assert f"{prefill['queued_tokens']:,}" in line


def test_a_snapshot_that_is_not_live_says_so_on_the_smallest_screen() -> None:
    snapshot = snapshot_of(DashboardWorld(2))
    shown = render(snapshot, url=URL, sort="queue", width=40, height=3, notice="not live since 12:00:00: gone")
    console = Console(width=40, file=StringIO())
    with console.capture() as captured:
        console.print(shown)
    assert captured.get().startswith("not live since 12:00:00: gone\n")


def test_names_of_others_reach_the_terminal_as_text() -> None:
    world = DashboardWorld(2, names=["[red]\x1b[2J", "b\r\n\x07"], tenants=["\x1b]0;x\x07[/]"])
    shown = screen(snapshot_of(world))
    assert "[red]?[2J" in shown
    assert "?]0;x?[/]" in shown
    assert "\x07" not in shown
    assert "\x1b[2J" not in shown


def test_the_autoscaler_does_not_contradict_itself() -> None:
    world = DashboardWorld(2)
    world.autoscaler = {"reason": "may not: add 1 prefill worker would help", "advice": "add 1 prefill worker"}
    assert "would help too" not in screen(snapshot_of(world))
    world.autoscaler = {"reason": "flip a to prefill: 70% in time", "advice": "add 1 prefill worker"}
    assert "would help too  add 1 prefill worker" in screen(snapshot_of(world))


def test_the_size_that_pays_back_is_shown() -> None:
    snapshot = snapshot_of(DashboardWorld(2))
    words = "host 64 GB: +11.0 points, pays back; 128 GB: +0.4, does not"
    assert f"memory  {words}\n" in screen({**snapshot, "curve": {**snapshot["curve"], "advice": [words]}})


def test_errors_are_shown_by_status_and_the_curve_has_a_scale() -> None:
    snapshot = snapshot_of(DashboardWorld(2), num_requests=40)
    assert "errors of the last minute  429 x " in screen(snapshot)
    assert re.search(r"[▁-█] of [0-9,]+, last minute", screen(snapshot, width=200))


def test_a_server_without_traffic_is_drawn() -> None:
    shown = screen(snapshot_of(DashboardWorld(0, tenants=()), num_requests=0))
    assert "requests/s" in shown.replace("\N{NO-BREAK SPACE}", " ")


def test_once_prints_one_screen(answers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    later = snapshot_of(DashboardWorld(2))
    first = later | {"traffic": {"window_s": 0, "waiting": 0, "running": 0}, "version": "without rates"}
    answers.append(httpx.Response(200, content=events(first, later)))
    assert run(["top", "--url", URL]) == 0  # the output is not a terminal
    shown = capsys.readouterr().out
    assert "decode-0" in shown
    assert "without rates" not in shown


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(404, json={"error": {"message": "Not Found"}}), "no /v1/dashboard"),
        (httpx.Response(403, json={"error": {"message": "Needs an operator's key."}}), "operator's key. (HTTP 403)"),
        (httpx.Response(502, content=b"<html>\x1b[2J"), "HTTP 502: <html>"),
        (httpx.Response(200, content=b'event: problem\ndata: {"message": "no hub"}\n\n'), "no hub"),
        (httpx.Response(200, content=b": no news\n\n"), "ended the connection"),
        (httpx.Response(200, content=b"event: snapshot\ndata: {not JSON\n\n"), "not a JSON object"),
        (httpx.Response(200, content=b"event: snapshot\ndata: [" + b"[" * 100_000 + b"\n\n"), "not a JSON object"),
        (httpx.Response(200, content=b'event: snapshot\ndata: "text"\n\n'), "not a JSON object"),
        (httpx.Response(200, content=b'data: "x"\n\n'), "not a JSON object"),
        (httpx.Response(200, content=b"event: snapshot\ndata: {}\n\n"), "not of this version"),
        (
            httpx.Response(200, content=b'event: snapshot\ndata: {"traffic": {"window_s": 1}}\n\n'),
            "not of this version",
        ),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(
    answers: list[Any], capsys: pytest.CaptureFixture[str], response: httpx.Response, message: str
) -> None:
    answers.append(response)
    assert run(["top", "--url", URL, "--once"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


def test_no_server_and_no_url_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9"]) == 2
    assert "start one with: tandem serve" in capsys.readouterr().err
    assert run(["top", "--url", "127.0.0.1"]) == 2
    assert "is not of the form" in capsys.readouterr().err


def test_a_lost_server_is_marked_and_found_again(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (snapshot_of(DashboardWorld(2)) | {"version": name} for name in ("first", "second"))
    pauses: list[float] = []

    def leave() -> httpx.Response:
        raise KeyboardInterrupt

    def refuse() -> httpx.Response:
        raise httpx.ConnectError("nobody listens")

    answers += [httpx.Response(200, content=events(first)), refuse, httpx.Response(200, content=events(second)), leave]
    monkeypatch.setattr(top.time, "sleep", pauses.append)
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=120, height=40)
    with httpx.Client(base_url=URL) as client, pytest.raises(KeyboardInterrupt):
        top._watch(client, console, "queue")
    shown = output.getvalue()
    assert shown.index("first") < shown.index("not live since") < shown.index("nobody listens") < shown.index("second")
    assert pauses == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("move", "words"),
    [
        ({"kind": "flip", "from": "decode", "to": "prefill"}, "w0 from decode to prefill: why"),
        ({"kind": "add"}, "w0 added: why"),
        ({"kind": "add", "withdrawn": "no room"}, "w0 was not added, no room: why"),
        ({"kind": "remove"}, "w0 removed: why"),
        ({"kind": "restart"}, "w0 restarted: why"),
    ],
)
def test_the_latest_move_is_told_in_a_line(move: dict[str, str], words: str) -> None:
    snapshot = snapshot_of(DashboardWorld(4))
    snapshot["autoscaler"]["moves"] = [{"worker": "w0", "reason": "why"} | move]
    assert f"latest move  {words}" in screen(snapshot)
