"""The dashboard in headless Chromium: what is seen, typed and read out. Screenshots go to bench-results/dashboard."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from playwright.sync_api import Page, expect
from prometheus_client import CollectorRegistry

from tandem.frontend.dashboard.feed import MAX_VIEWERS
from tandem.frontend.dashboard.routes import add_dashboard
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.server import http_server
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import WorkerState
from tests.browser.conftest import Windows
from tests.cluster.test_route import fakes, routing
from tests.support.dashboard_world import DashboardWorld
from tests.support.keys import api_keys_of, make_key_file
from tests.support.server import started

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

LEAST_CONTRAST = 4.5
CONTRAST = (Path(__file__).parents[1] / "support" / "page_checks.js").read_text()
HOSTILE = '<img src=x onerror="window.hacked=1">'
SCHEMES = ("light", "dark")


START_S = 20.0


class World(Protocol):
    """What the dashboard is of."""

    @property
    def metrics(self) -> FrontendMetrics:
        """The metrics of its requests."""

    async def overview(self) -> dict[str, Any]:
        """As `OperatorApi.overview`."""


@contextmanager
def dashboard_server(world: World, api_keys: ApiKeys | None = None, *, port: int = 0) -> Iterator[str]:
    """Serve the world's dashboard while the block runs; the URL of the server."""
    listener = socket.create_server(("127.0.0.1", port))
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    has_started = threading.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(world, api_keys or ApiKeys(), listener, has_started.set, stop))
    )
    thread.start()
    try:
        assert has_started.wait(START_S), "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        loop.close()
        listener.close()


async def _serve(
    world: World, api_keys: ApiKeys, listener: socket.socket, on_started: Callable[[], None], stop: asyncio.Event
) -> None:
    app = RouterApp(RouterConfig(), FrontendMetrics(CollectorRegistry()), api_keys, version="1.2.3")
    add_dashboard(app, overview=world.overview, traffic=world.metrics.traffic, api_keys=api_keys)
    async with (
        app.router.lifespan_context(app),
        http_server(app, RouterConfig(), listener, CollectorRegistry(), on_drain=app.drain) as server,
    ):
        await server.has_started.wait()
        on_started()
        await stop.wait()


class LiveWorld(DashboardWorld):
    """A second of traffic passes with each snapshot."""

    num_requests_per_tick = 10

    async def overview(self) -> dict[str, Any]:
        self.tick(self.num_requests_per_tick)
        return await super().overview()


def live(page: Page) -> Page:
    """The page once it shows live figures."""
    expect(page.locator("#status")).to_have_text("Live")
    return page


def figure(page: Page, tile: str) -> str:
    return page.locator("#traffic li", has_text=tile).locator(".figure").inner_text()


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


def until_second_window(page: Page) -> None:
    """Wait for rates, which the first snapshot has none of."""
    expect(page.locator("#traffic .figure").first).not_to_have_text("–")


def test_figures_follow_the_server(windows: Windows) -> None:
    world = LiveWorld()
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        until_second_window(page)
        newest = page.locator("#decisions .decision .head").first
        before, first_tokens = newest.element_handle(), figure(page, "Output tokens")
        assert before is not None
        world.num_requests_per_tick = 50
        expect(page.locator("#traffic li", has_text="Output tokens").locator(".figure")).not_to_have_text(first_tokens)
        page.wait_for_function("(old) => document.querySelector('#decisions .head') !== old", arg=before)
        expect(page.locator("#models")).to_have_text("org/toy")
        expect(page.locator("#flow li")).to_have_count(5)


def test_a_decision_shows_its_terms_and_why_it_was_better(windows: Windows) -> None:
    with dashboard_server(LiveWorld()) as url, windows.open(url) as page:
        decision = live(page).locator(".decision:not(.refused)").first
        expect(decision.locator(".why")).to_have_text(
            re.compile(r"^0\.\d{3} s cheaper: saves 0\.\d{3} s slowing others")
        )
        page.get_by_role("button", name="Pause").click()
        decision.locator("summary").click()
        cells = decision.locator("tbody tr").all_inner_texts()
        assert [text.split("\t")[0] for text in cells] == [
            "queue waiting for other prompts",
            "loading cached KV reading cached blocks from a tier or another worker",
            "computing the prompt computing the rest of the prompt",
            "slowing others what computing this prompt takes from the answers that run there",
            "sending KV the part of the KV transfer that computing does not hide",
            "waiting for KV memory waiting until the decode worker has room",
            "decoding decoding the answer",
            "total",
        ]
        chosen, runner_up, difference = (float(text.split()[0]) for text in cells[-1].split("\t")[1:])
        assert chosen < runner_up
        assert difference == pytest.approx(runner_up - chosen, abs=0.0011)
        widths = decision.locator(".chosen .part").evaluate_all("parts => parts.map(part => part.clientWidth)")
        assert sum(widths) > 0
        expect(decision.locator(".common")).to_have_text("Not drawn: 0.300 s of decoding, the same for both")
        bar, drawn = (
            decision.locator(place).bounding_box() for place in (".runner-up .bar", ".runner-up .part >> nth=-1")
        )
        assert bar is not None
        assert drawn is not None
        assert bar["x"] + bar["width"] == pytest.approx(drawn["x"] + drawn["width"], abs=2), (
            "the longer one fills its bar"
        )


def test_charts_have_a_scale_and_a_range_that_is_longer_than_a_minute(windows: Windows) -> None:
    world = LiveWorld()
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        until_second_window(page)
        chart = page.locator("#traffic li", has_text="TTFT").locator(".sparkline")
        expect(chart.locator(".highest")).to_have_text(re.compile(r"^[\d.]+ ms$"))
        expect(chart.locator(".from")).to_have_text("−1 min")
        expect(chart.locator("svg g")).to_have_count(3)  # p99, p90, p50
        with page.expect_response(f"{url}/v1/dashboard/history"):
            page.get_by_role("button", name="15 min").click()
        expect(chart.locator(".from")).to_have_text("−15 min")
        expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="1 min").click()
        expect(chart.locator(".from")).to_have_text("−1 min")


def test_errors_flags_and_version_are_shown(windows: Windows) -> None:
    world = LiveWorld()
    world.metrics.requests.labels("/v1/chat/completions", "400").inc(1234)
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        row = page.locator("#errors tbody tr", has_text="400")
        expect(row).to_contain_text("wrong request")
        expect(row.locator("td").last).to_have_text("1,234")
        expect(page.locator("#version")).to_have_text("Tandem 1.2.3")
        expect(page.locator("#settings")).to_have_text(
            "Started with --prefill 1 --decode 1 --host-cache-gb 8.0 --no-autoscale"
        )


def test_on_a_phone_the_workers_come_before_the_decisions(windows: Windows) -> None:
    with dashboard_server(LiveWorld()) as url, windows.open(url, width=390) as page:
        live(page)
        workers, decisions = (page.locator(place).bounding_box() for place in ("#members-title", "#decisions-title"))
        assert workers is not None
        assert decisions is not None
        assert workers["y"] < decisions["y"]


def test_a_key_is_asked_for_and_kept_in_the_tab_only(windows: Windows) -> None:
    api_keys = api_keys_of({"operator": "*", "ours": "search"})
    with dashboard_server(LiveWorld(), api_keys) as url, windows.open(url, expects_errors=True) as page:
        key, error = page.get_by_label("API key"), page.locator("#key-error")
        expect(key).to_be_focused()
        expect(page.locator("#panels")).to_be_hidden()
        for wrong, message in [("guess", "missing or wrong"), ("ours", "concerns all tenants")]:
            key.fill(wrong)
            key.press("Enter")
            expect(error).to_contain_text(message)
        key.fill("operator")
        key.press("Enter")
        live(page)
        page.reload()
        live(page)
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        page.get_by_role("button", name="Forget key").click()
        expect(key).to_be_visible()
        expect(page.locator("#panels")).to_be_hidden()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_revoked_key_is_asked_for_again(windows: Windows) -> None:
    api_keys = api_keys_of({"operator": "*"})
    with dashboard_server(LiveWorld(), api_keys) as url, windows.open(url, expects_errors=True) as page:
        page.get_by_label("API key").fill("operator")
        page.keyboard.press("Enter")
        live(page)
        api_keys.replace([])
        expect(page.locator("#key-error")).to_contain_text("missing or wrong")
        expect(page.locator("#panels")).to_be_hidden()


def test_hostile_names_stay_text(windows: Windows) -> None:
    names = [f"{HOSTILE}{number}" for number in range(12)]
    world = LiveWorld(12, names=names, tenants=(HOSTILE, "javascript:alert(1)", "__proto__"))
    world.autoscaler = {
        "reason": HOSTILE,
        "flips": [{"worker": HOSTILE, "from": "x", "to": "y", "reason": HOSTILE, "began": 1.0}],
    }
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        until_second_window(page)
        for place in ("#members tbody th", "#tenants tbody th", "#decisions .when", "#autoscaler .reason"):
            expect(page.locator(place, has_text=HOSTILE).first).to_be_visible()
        expect(page.locator("#tenants tbody th", has_text="__proto__")).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("body img, body script:not([type=module]), body iframe").count() == 0
        assert page.evaluate("document.querySelectorAll('[onerror], [onclick], [href^=javascript]').length") == 0


def test_no_inline_script_can_run(windows: Windows) -> None:
    with dashboard_server(LiveWorld()) as url, windows.open(url, expects_errors=True) as page:
        live(page)
        done = """() => {
            window.violations = [];
            document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.blockedURI));
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "http://example.invalid/x.png";
            document.body.append(image);
        }"""
        with suppress(AssertionError), windows.open(url) as other:  # its complaints are what is wanted
            live(other).evaluate(done)
            other.wait_for_function("window.violations.length === 2")
            assert other.evaluate("window.hacked") is None
            seen = other.evaluate("window.violations")
        assert sorted(seen) == ["http://example.invalid/x.png", "inline"]


@pytest.mark.parametrize("num_workers", [2, 200])
@pytest.mark.parametrize("width", [320, 360, 768, 1440])
def test_nothing_scrolls_sideways(windows: Windows, num_workers: int, width: int) -> None:
    names = [f"{'a-very-long-name-of-a-worker-' * 3}{number}" for number in range(num_workers)]
    with dashboard_server(LiveWorld(num_workers, names=names)) as url, windows.open(url, width=width) as page:
        live(page)
        until_second_window(page)
        assert not scrolls_sideways(page)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 1440])
def test_text_can_be_read(windows: Windows, scheme: str, width: int) -> None:
    world = LiveWorld(20)
    world.autoscaler = {"reason": "hold", "prefill_wait_s": 1.0, "decode_wait_s": 0.5, "flips": []}
    with dashboard_server(world) as url, windows.open(url, width=width, color_scheme=scheme) as page:
        live(page)
        until_second_window(page)
        assert page.evaluate(CONTRAST, LEAST_CONTRAST) == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
        assert dark == (scheme == "dark")


def test_everything_can_be_done_by_keyboard(windows: Windows) -> None:
    with dashboard_server(LiveWorld(20)) as url, windows.open(url) as page:
        live(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Pause")).to_be_focused()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
        page.keyboard.press("Space")
        expect(page.locator("#status")).to_have_text(re.compile("^Paused since"))
        for name in ("1 min", "15 min", "1 h"):
            page.keyboard.press("Tab")
            expect(page.get_by_role("button", name=name)).to_be_focused()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "decisions"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.parentElement.open") is True
        page.get_by_label("Filter").focus()
        page.keyboard.type("decode-3")
        expect(page.locator("#members tbody tr")).to_have_count(1)
        page.get_by_label("Filter").fill("")
        page.get_by_role("button", name="Queue").focus()
        page.keyboard.press("Enter")
        head = page.get_by_role("columnheader", name="Queue")
        expect(head).to_have_attribute("aria-sort", "descending")
        page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", "ascending")


def test_a_screen_reader_finds_its_way(windows: Windows) -> None:
    world = LiveWorld(20)
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        until_second_window(page)
        snapshot = page.locator("body").aria_snapshot()
        for part in ("banner:", "main:", "contentinfo:", 'heading "Tandem org/toy" [level=1]', "status: Live"):
            assert part in snapshot, part
        for region in (
            "Traffic figures of the last minute",
            "Path of a request",
            "KV cache",
            "Tenants refusals since the start",
            "Errors since the start",
            "Workers",
        ):
            assert f'region "{region}"' in snapshot, region
            assert f'heading "{region}" [level=2]' in snapshot, region
        for column in ("Tenant", "Share", "Name", "Role", "Queue"):
            assert f'columnheader "{column}"' in snapshot, column
        assert 'rowheader "decode-0"' in snapshot
        assert re.search(r'img "Miss-ratio curve: .*pool misses \d+', snapshot), snapshot
        assert re.search(r'img "\d+ of 20 more than 90% full, 0 not ready"', snapshot), snapshot
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(node => Number(node.tagName[1]))")
        assert all(after - before <= 1 for before, after in pairwise(levels))
        assert page.locator("[aria-live], [role=status], [role=alert]").count() == 3  # state, banner, key


def test_motion_can_be_switched_off(windows: Windows) -> None:
    arrow = "getComputedStyle(document.querySelector('[data-flows=yes]'), '::after').animationName"
    for wish, name in [("no-preference", "flow"), ("reduce", "none")]:
        with dashboard_server(LiveWorld()) as url, windows.open(url, reduced_motion=wish) as page:
            live(page)
            page.wait_for_selector("[data-flows=yes]")
            assert page.evaluate(arrow) == name


def test_hundreds_of_workers_are_updated_in_place(windows: Windows) -> None:
    world = LiveWorld(200)
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        rows = page.locator("#members tbody tr")
        expect(rows).to_have_count(200)
        expect(page.locator("#map .cell")).to_have_count(200)
        page.evaluate("document.querySelectorAll('#members tr, #map .cell').forEach(node => node.isOld = true)")
        old = page.locator("#members").inner_text()
        page.wait_for_function("(old) => document.querySelector('#members').innerText !== old", arg=old)
        kept = "[...document.querySelectorAll('#members tr, #map .cell')].every(node => node.isOld)"
        assert page.evaluate(kept) is True
        page.get_by_label("Filter").fill("prefill ready")
        expect(rows).to_have_count(100)
        expect(page.locator("#members-count")).to_have_text("100 of 200 workers")
        page.get_by_role("button", name="Running").click()
        page.get_by_role("button", name="Pause").click()
        running = [int(text.split("/")[0]) for text in rows.locator("td:nth-child(4)").all_inner_texts()]
        assert running == sorted(running, reverse=True)
        world.registry.set_state("prefill-7", WorkerState.DEAD, "test")
        page.get_by_role("button", name="Go on").click()
        expect(rows).to_have_count(99)


def test_a_lost_connection_is_seen_and_comes_back(windows: Windows, pictures: Path) -> None:
    world = LiveWorld()
    with dashboard_server(world) as url:
        port = int(url.rpartition(":")[2])
        opened = windows.open(url, expects_errors=True)
        page = live(opened.__enter__())
        until_second_window(page)
    expect(page.locator("#status")).to_have_text(re.compile(r"^Disconnected since \d\d:\d\d:\d\d$"))
    expect(page.locator("#banner")).to_contain_text("All figures below are of then.")
    assert page.title().startswith("Disconnected since")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"
    page.screenshot(path=pictures / "disconnected.png")
    with dashboard_server(world, port=port):
        live(page)
        expect(page.locator("#banner")).to_be_hidden()
    with suppress(AssertionError):  # the console's complaints about the lost connection
        opened.__exit__(None, None, None)


def test_a_server_that_cannot_build_snapshots_is_not_shown_as_live(windows: Windows) -> None:
    world = LiveWorld()
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        del world.metrics
        expect(page.locator("#status")).to_have_text(re.compile("^No new data since"))
        expect(page.locator("#banner")).to_contain_text("The server's log says why", ignore_case=True)


def test_a_hidden_tab_costs_nothing(windows: Windows) -> None:
    world = LiveWorld()
    hide = """(isHidden) => {
        Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        page.evaluate(hide, True)
        silent = re.compile("^No new data")  # it would say so to one who looked
        expect(page.locator("#status")).to_have_text(silent, timeout=40_000)
        num_requests = world.num_requests
        page.wait_for_timeout(2500)
        assert world.num_requests == num_requests
        page.evaluate(hide, False)
        live(page)
        assert world.num_requests > num_requests


def test_one_viewer_too_many_is_told_so_and_gets_the_next_free_place(windows: Windows) -> None:
    with dashboard_server(LiveWorld()) as url, ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            stack.enter_context(httpx.stream("GET", f"{url}/v1/dashboard", timeout=60, trust_env=False))
        with windows.open(url, expects_errors=True) as page:
            expect(page.locator("#status")).to_have_text("Not connected")
            expect(page.locator("#banner")).to_contain_text(f"{MAX_VIEWERS} dashboards are open")
            stack.close()
            expect(page.locator("#status")).to_have_text("Live", timeout=40_000)
            expect(page.locator("#banner")).to_be_hidden()


def test_a_clock_that_is_set_back_does_not_make_old_figures_look_new(windows: Windows) -> None:
    class SilentWorld(LiveWorld):
        async def overview(self) -> dict[str, Any]:
            await asyncio.to_thread(may_answer.wait, 60)
            return await super().overview()

    world, may_answer = SilentWorld(), threading.Event()
    may_answer.set()
    with dashboard_server(world) as url, windows.open(url) as page:
        live(page)
        page.evaluate("{ const now = Date.now; Date.now = () => now() - 3_600_000; }")
        may_answer.clear()
        expect(page.locator("#status")).to_have_text(re.compile("^No new data since"), timeout=20_000)
        may_answer.set()
        live(page)


def test_a_small_curve_has_a_gap_where_nobody_looked(windows: Windows) -> None:
    draw = """async () => {
        const { drawSparkline, sparkline } = await import("./dashboard/charts.js");
        const chart = sparkline();
        const line = { name: "p50", points: [[0, 1], [1, 2], [40, 1], [41, 3]] };
        drawSparkline(chart, [line], 41, { name: "1 min", seconds: 60, step: 1 }, String);
        return chart.querySelector(".line").getAttribute("d").replace(/[^ML]/g, "");
    }"""
    with dashboard_server(LiveWorld()) as url, windows.open(url) as page:
        assert live(page).evaluate(draw) == "MLML"


@pytest.mark.parametrize("width", [320, 768, 1440])
def test_nothing_is_cut_and_no_names_overlap(windows: Windows, width: int) -> None:
    boxes = "nodes => nodes.map(node => node.getBoundingClientRect()).map(({left, right, top}) => [top, left, right])"
    world = LiveWorld(8)
    world.fill(5)
    with dashboard_server(world) as url, windows.open(url, width=width) as page:
        live(page)
        until_second_window(page)
        found = sorted(page.locator(".curve .name").evaluate_all(boxes))
        assert len(found) == 4
        for (top, left, right), (next_top, next_left, _) in pairwise(found):
            assert left < right
            assert next_top > top or next_left > right
        right_edge = page.locator("#curve").evaluate("node => node.getBoundingClientRect().right")
        assert all(right <= right_edge + 1 for _, _, right in found)
        for table in ("#tenants", "#errors", "#members"):
            assert page.locator(table).evaluate("node => node.scrollWidth <= node.parentElement.clientWidth"), table


@contextmanager
def requests_to(url: str, model: str, headers: dict[str, str]) -> Iterator[None]:
    """Four clients that send requests while the block runs; half of a prompt is one that was sent before."""
    stop = threading.Event()

    def run(number: int) -> None:
        for turn in range(10_000):
            if stop.is_set():
                return
            prompt = "word " * (20 + 15 * (turn % 4)) + f"{number} {turn // 2}"
            body = {"model": model, "prompt": prompt, "max_tokens": 24, "stream": True, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(run, number) for number in range(4)]
        try:
            yield
        finally:
            stop.set()
    for one in running:
        one.result()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_tandem_serve(windows: Windows, text_model: Path, tmp_path: Path, pictures: Path, num_processes: int) -> None:
    key_file = make_key_file(tmp_path / "keys.json", {"operator": "*"})
    flags = ["--pool-bytes", "20000000", "--host-cache-gb", "0.02", "--api-key-file", str(key_file)]
    with started(text_model, tmp_path, *flags, "--router-processes", str(num_processes)) as server:
        server.wait_ready()
        with (
            requests_to(server.url, "tiny", {"authorization": "Bearer operator"}),
            windows.open(server.url, expects_errors=True) as page,
        ):
            page.get_by_label("API key").fill("operator")
            page.keyboard.press("Enter")
            live(page)
            for title in ("Requests", "Output tokens", "TTFT", "ITL"):
                tile = page.locator("#traffic li", has_text=title).locator(".figure")
                expect(tile).to_have_text(re.compile(r"^[1-9]|^0\.\d"), timeout=60_000)
            members = page.locator("#members tbody th")  # in the order in which they joined
            expect(members).to_have_count(2)
            assert sorted(text.strip() for text in members.all_text_contents()) == ["decode-0", "prefill-0"]
            expect(page.locator("#decisions .why").first).not_to_be_empty()
            expect(page.locator("#tiers li")).to_have_count(2)
            expect(page.locator("#hits .legend li").first).to_be_visible()
            assert not scrolls_sideways(page)
        assert server.stop() == 0


def test_tandem_route(windows: Windows, tmp_path: Path, pictures: Path) -> None:
    with fakes(2) as engines, routing(tmp_path, engines, 2) as running:  # noqa: SIM117
        with requests_to(running.url, "fake-model", {}), windows.open(running.url) as page:
            live(page)
            expect(page.get_by_role("heading", name="Engines")).to_be_visible()
            expect(page.locator("#members tbody th")).to_have_text(["e0", "e1"])
            expect(page.locator("#cache-panel")).to_be_hidden()
            expect(page.locator("#traffic li", has_text="TTFT").locator(".figure")).not_to_have_text("–")
            engines[0].stop()
            row = page.locator("#members tbody tr").first
            expect(row).not_to_have_attribute("data-state", "ready")
            expect(row).to_contain_text(re.compile("circuit open|dead|lost|starting"))
            page.screenshot(path=pictures / "engines.png", full_page=True)
