"""The whole product in real processes: answers, deaths and ends of two servers.

One has a prefill and a decode worker over NIXL, the other one a single worker, as the installed wheel starts it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Annotated, Any
from urllib.parse import urljoin

import anthropic
import openai
import psutil
import pydantic
import pytest

from tests.support.hostile_check import check_hostile_inputs
from tests.support.server import HTTP, REPOSITORY, Server, started
from tests.support.tiny_llama import save_tiny_text_model
from tests.support.waiting import until
from tests.support.wheel import built_wheel, folder_of_our_names, installed_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

POOL = ("--pool-bytes", "20000000")
WORKER_TIMEOUT_S = 6.0


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with twelve layers: a worker must still compute an answer when a test ends it, also if the client lags."""
    return save_tiny_text_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=12)


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without drafts, which repeat an answer that was given before within milliseconds."""
    flags = ("--routing=cost,pairs", "--worker-timeout-s", str(WORKER_TIMEOUT_S), "--max-restarts", "9")
    flags += ("--speculate", "off", *POOL)
    with started(text_model, tmp_path_factory.mktemp("log"), *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command of an environment that has the wheel, without the extra `otel`."""
    return installed_command(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def colocated(text_model: Path, installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The wheel's command in a folder with modules that have our names and others': no process may import them.

    It serves until its worker dies, which the last test does to it.
    """
    folder = tmp_path_factory.mktemp("colocated")
    flags = ("--colocated", "--router-processes", "2", "--max-restarts", "0", *POOL)
    names = folder_of_our_names(folder / "project")
    with started(text_model, folder, *flags, tandem=[installed], cwd=names, env={"PYTHONPATH": ""}) as server:
        yield server.wait_ready()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(server: Server, prompt: str, **fields: Any) -> str:
    with client_of(server) as client:
        fields = {"max_tokens": 24, "temperature": 0} | fields
        return client.completions.create(model="tiny", prompt=prompt, **fields).choices[0].text


@pytest.fixture(autouse=True)
def left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, those of the servers that still run have no request, no block in use, and their workers."""
    shared = [request.getfixturevalue(name) for name in ("server", "colocated") if name in request.fixturenames]
    workers = [worker_ids(one) for one in shared]
    yield
    for one, found in zip(shared, workers, strict=True):
        if one.process.poll() is None:
            until(lambda one=one: check_of(one)["idle"], 30, lambda one=one: str(check_of(one)))
            assert one.is_ready()
            assert worker_ids(one) == found


def worker_ids(server: Server) -> set[str]:
    roles = HTTP.get(f"{server.url}/v1/pools").json()["roles"]
    return {worker["worker_id"] for workers in roles.values() for worker in workers}


def check_of(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = HTTP.post(f"{server.url}/v1/pools/check").json()
    return report


def test_the_wheel_has_one_top_level_name_and_all_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        licenses = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {"tandem"}
    assert licenses
    folders = {path.name for path in (REPOSITORY / "tandem").iterdir() if path.is_symlink()}
    sources = {
        str(Path("tandem", path.relative_to(REPOSITORY)))
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }
    assert sources - names == set()
    some = ("py.typed", "engine/cpu/common.h", "helm/tandem/Chart.yaml", "helm/tandem/templates/NOTES.txt")
    some += ("helm/tandem/.helmignore", "frontend/http/static/main.js", "frontend/dashboard/static/index.html")
    assert {f"tandem/{name}" for name in some} <= names


def test_without_its_extra_tracing_is_refused_at_once(installed: str, text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, "--tracing", tandem=[installed], cwd=tmp_path, env={"PYTHONPATH": ""}) as server:
        assert server.wait_ended() == 2
    (line,) = server.output.strip().splitlines()
    assert line.startswith("tandem: --tracing needs the extra otel")
    assert line.endswith("pip install 'tandem-serve[otel]'")


def test_the_pages_of_the_wheel_have_all_their_files(colocated: Server) -> None:
    assert files_of_page(f"{colocated.url}/docs") > 5
    assert files_of_page(f"{colocated.url}/dashboard") > 10


def files_of_page(url: str) -> int:
    """Get a page, and every file that it links to or imports. Returns the number of files."""
    found, left = set[str](), [url]
    while left:
        file = left.pop()
        answer = HTTP.get(file)
        assert answer.status_code == 200, (file, answer.text)
        found.add(file)
        links = re.findall(r'(?:src=|href=|from )"([^#"]+)"', answer.text)
        left += [one for one in (urljoin(file, link) for link in links) if one not in found]
    return len(found)


def test_a_normal_start_prints_its_progress_and_nothing_else(server: Server) -> None:
    lines = [line for line in server.output.splitlines() if line.strip()]
    progress = [line for line in lines if line.lstrip()[0].isdigit()]
    assert [line.split(maxsplit=2)[2] for line in progress][:2] == ["starting Ray", "loading tiny into 2 worker(s)"]
    rest = [line.strip() for line in lines if line not in progress]
    assert [line.split()[0] for line in rest] == ["Serving", "Try:", "curl", "tandem"], server.output


class Person(pydantic.BaseModel):
    """What the model, whose weights are random, is made to describe."""

    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=9)]


def test_structured_output_is_the_same_on_two_workers_and_on_one(server: Server, colocated: Server) -> None:
    question: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": Person,
        "temperature": 1.0,
        "seed": 11,
        "n": 3,
        "max_tokens": 400,
    }
    answers = []
    for one in (server, colocated):
        with client_of(one) as client:
            choices = client.chat.completions.parse(**question).choices
        assert all(isinstance(choice.message.parsed, Person) for choice in choices)
        answers.append([choice.message.content for choice in choices])
    assert (answers[0], len(set(answers[0]))) == (answers[1], 3)


def test_forced_tool_calls_fit_and_are_the_same_on_two_workers_and_on_one(server: Server, colocated: Server) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    }
    question: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 300,
    }
    answers = []
    for one in (server, colocated):
        with client_of(one) as client:
            plain = client.chat.completions.create(**question).choices[0]
            with client.chat.completions.stream(**question) as stream:
                streamed = stream.get_final_completion().choices[0]
        for choice in (plain, streamed):
            assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
            calls: Any = choice.message.tool_calls
            (call,) = calls
            arguments = json.loads(call.function.arguments)
            assert (call.function.name, arguments.keys()) == ("weather", {"city", "days"})
            assert arguments["days"] in range(1, 10)
            answers.append(arguments)
    assert all(answer == answers[0] for answer in answers)


def test_the_responses_api_answers_as_chat_and_goes_on_from_a_response(server: Server) -> None:
    with client_of(server) as client:
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Who?"}], temperature=0, max_tokens=20
        )
        asked: Any = {"model": "tiny", "input": "Who?", "temperature": 0, "max_output_tokens": 20}
        plain = client.responses.create(**asked)
        with client.responses.create(**asked, stream=True) as stream:
            *_, last = stream
        assert last.type == "response.incomplete"
        streamed = last.response
        assert plain.output_text == streamed.output_text == chat.choices[0].message.content
        assert plain.usage is not None
        assert plain.usage.output_tokens == 20
        longer = client.responses.create(**(asked | {"input": "And?"}), previous_response_id=streamed.id)
        assert longer.usage is not None
        assert longer.usage.input_tokens > plain.usage.total_tokens
        assert longer.usage.input_tokens_details.cached_tokens > 0


def test_messages_are_the_same_plain_and_streamed_on_two_workers_and_on_one(server: Server, colocated: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    question: Any = {
        "model": "tiny",
        "system": "Answer in short.",
        "messages": [{"role": "user", "content": "Weather?"}],
        "max_tokens": 200,
        "extra_body": {"seed": 11},
    }
    forced: Any = question | {
        "tools": [{"name": "weather", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    answers = []
    for one in (server, colocated):
        with anthropic.Anthropic(base_url=one.url, api_key="none", max_retries=0, timeout=60) as client:
            for asked in (question | {"max_tokens": 24}, forced):
                plain = client.messages.create(**asked)
                with client.messages.stream(**asked) as stream:
                    streamed = stream.get_final_message()
                for message in (plain, streamed):
                    shown = [block.model_dump(exclude={"id"}) for block in message.content]
                    answers.append((asked is forced, shown, message.stop_reason, message.usage.output_tokens))
            fields = {name: forced[name] for name in ("model", "system", "messages", "tools", "tool_choice")}
            counted = client.messages.count_tokens(**fields).input_tokens
            cached = streamed.usage.cache_read_input_tokens or 0
            assert cached > 0
            assert counted == streamed.usage.input_tokens + cached
    for is_forced in (False, True):
        first, *others = [answer for answer in answers if answer[0] is is_forced]
        assert all(other == first for other in others)
        assert len(others) == 3
    (call,), reason = answers[-1][1:3]
    assert (call["type"], call["name"], call["input"].keys(), reason) == ("tool_use", "weather", {"city"}, "tool_use")


def test_a_hostile_schema_is_refused_and_nobody_else_notices(server: Server) -> None:
    hostile = {"type": "integer", "multipleOf": 99999989}
    with client_of(server) as client, pytest.raises(openai.BadRequestError, match="takes more than"):
        client.completions.create(
            model="tiny", prompt="a", max_tokens=5, extra_body={"structured_outputs": {"json": hostile}}
        )
    costly = 'start: (x{1,1000}){1,1000}\nx: "a"'  # only a step shows what it costs
    with client_of(server) as client, pytest.raises(openai.BadRequestError, match="grammar cannot be used"):
        client.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=200,
            logit_bias={"2": -100},  # not to end before
            extra_body={"structured_outputs": {"grammar": costly}},
        )
    assert complete(server, "still here")


def test_a_prompt_is_scored_the_same_on_two_workers_and_on_one(server: Server, colocated: Server) -> None:
    prompts = ["The quick brown fox" * 9, "hi"]
    question: Any = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 2}
    answers = []
    for one in (server, colocated, server):  # at the end the prompts are cached
        with client_of(one) as client:
            only = client.completions.create(**question, max_tokens=0).model_dump()
            longer = client.completions.create(**question, max_tokens=5, temperature=0, n=2).model_dump()
            streamed = list(client.completions.create(**question, max_tokens=0, stream=True))
        assert only["usage"]["completion_tokens"] == 0
        answers.append([[choice["logprobs"] for choice in answer["choices"]] for answer in (only, longer)])
        first = [chunk.choices[0].model_dump() for chunk in streamed if chunk.choices[0].logprobs]
        assert {choice["index"]: choice["logprobs"] for choice in first} == dict(enumerate(answers[-1][0]))
        for index, choice in enumerate(longer["choices"]):
            for name, scores in only["choices"][index // 2]["logprobs"].items():
                assert choice["logprobs"][name][: len(scores)] == scores
                assert len(choice["logprobs"][name]) == len(scores) + 5
    assert answers[0] == answers[1] == answers[2]


def test_nothing_listens_beyond_loopback(server: Server, colocated: Server) -> None:
    processes = (
        {psutil.Process(of.process.pid) for of in (server, colocated)} | server.children() | colocated.children()
    )
    addresses = {
        (process.name(), connection.laddr.ip)
        for process in processes
        if process.is_running()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.laddr and connection.type == socket.SOCK_DGRAM)
    }
    assert len(addresses) > 3, addresses
    outer = {(name, ip) for name, ip in addresses if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback}
    assert not outer


def test_ray_starts_no_process_that_no_worker_uses(server: Server) -> None:
    names = [process.name() for process in server.children() if process.is_running()]
    assert "ray::IDLE" not in names
    assert sum(name.startswith("ray::WorkerActor") for name in names) == 2


def test_workers_open_no_port_but_that_of_ray(server: Server) -> None:
    """KV goes from process to process: through a port of UCX any user of the machine could write into a pool."""
    workers = [process for process in server.children() if process.name().startswith("ray::WorkerActor")]
    assert len(workers) >= 2
    for worker in workers:
        listening = [at for at in worker.net_connections("inet") if at.status == psutil.CONN_LISTEN]
        assert len(listening) == 1, listening


def test_ray_is_for_its_own_processes_alone(server: Server) -> None:
    gcs = next(process for process in server.children() if process.name() == "gcs_server")
    token = gcs.environ()["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    for process in server.children():
        if process.is_running():
            assert token not in " ".join(process.cmdline())
    for folder in server.scratch.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "Ray opens the folders it is given to everyone"
        assert token not in "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    port = next(connection.laddr.port for connection in gcs.net_connections("inet") if connection.status == "LISTEN")
    code = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).cluster_id.hex())"

    def ask(**environment: str) -> subprocess.CompletedProcess[str]:
        """Ask Ray's head for its id, as any Ray client does first."""
        known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.run(
            [sys.executable, "-c", code, f"127.0.0.1:{port}"],
            env=known | {"RAY_gcs_rpc_server_connect_timeout_s": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).returncode == 0
    for refused in (ask(RAY_AUTH_MODE="disabled"), ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)):
        assert refused.returncode != 0
        assert "Unauthenticated" in refused.stderr


def test_workers_are_reached_through_a_private_folder(server: Server) -> None:
    sockets = [path for path in server.scratch.glob("*/*") if path.is_socket()]
    assert {path.name.rsplit("-", 1)[0] for path in sockets} == {"prefill-0", "decode-0"}
    [folder] = {path.parent for path in sockets}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_disaggregated_over_nixl_is_colocated_token_for_token(server: Server, colocated: Server) -> None:
    random_ = random.Random(1)
    before = HTTP.get(f"{server.url}/v1/pools").json()["num_handoffs"]
    lengths = [1, 14, 15, 16, 17, 31, 200, 511, 512, 600, 1500]  # in bytes, which are tokens; <s> comes before them
    prompts = ["".join(random_.choices("abcdefgh wor", k=length)) for length in lengths]
    prompts += [prompt + " and more" for prompt in prompts[-4:]]  # prefix hits
    prompts += [prompts[2]] * 2
    for idx, prompt in enumerate(prompts):
        fields = {} if idx % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": idx}
        assert complete(server, prompt, **fields) == complete(colocated, prompt, **fields), (idx, len(prompt))
    assert HTTP.get(f"{server.url}/v1/pools").json()["num_handoffs"] - before >= len(prompts) // 2


@pytest.mark.slow
def test_some_hostile_inputs_of_each_group_get_no_5xx_and_cost_no_worker(server: Server) -> None:
    check_hostile_inputs(server, step=12)


def test_an_answer_goes_on_when_its_decode_worker_hangs(server: Server, colocated: Server) -> None:
    victim = server.worker("decode")
    fields: dict[str, Any] = {"prompt": "x" * 100, "max_tokens": 1600, "temperature": 0.8, "seed": 19}
    body: dict[str, Any] = {"model": "tiny", "stream": True, "extra_body": {"ignore_eos": True}} | fields
    with client_of(server) as client, client_of(colocated) as undisturbed:
        stream = client.completions.create(**body)
        text = "".join(next(stream).choices[0].text for _ in range(4))
        psutil.Process(victim["pid"]).suspend()
        lost, longest_s = time.monotonic(), 0.0
        for chunk in stream:
            longest_s, lost = max(longest_s, time.monotonic() - lost), time.monotonic()
            text += chunk.choices[0].text
        assert text == "".join(chunk.choices[0].text for chunk in undisturbed.completions.create(**body))
    print(f"longest silence: {longest_s:.2f} s")
    server.wait_recovered(victim)
    assert not psutil.pid_exists(victim["pid"])
    assert 'tandem_request_moves_total{cause="worker_lost"}' in HTTP.get(f"{server.url}/metrics").text


def test_an_answer_with_a_grammar_goes_on_when_its_worker_is_killed(server: Server) -> None:
    victim = server.worker("decode")
    body = {"structured_outputs": {"regex": "[a-z]{500}(, and no more){9}"}}
    fields: Any = {"model": "tiny", "prompt": "z" * 50, "max_tokens": 620, "temperature": 0, "extra_body": body}
    with client_of(server) as client:
        stream = client.completions.create(stream=True, **fields)
        text = "".join(next(stream).choices[0].text for _ in range(4))
        psutil.Process(victim["pid"]).kill()
        text += "".join(chunk.choices[0].text for chunk in stream)
        server.wait_recovered(victim)
        assert client.completions.create(**fields).choices[0].text == text
    assert text.endswith(", and no more" * 3)


def test_a_prompt_goes_on_when_its_prefill_worker_is_killed(server: Server, colocated: Server) -> None:
    victim = server.worker("prefill")
    process = psutil.Process(victim["pid"])
    process.suspend()  # so that the prompt is on its way, whatever its speed
    Timer(1.0, process.kill).start()
    assert complete(server, "y" * 1900) == complete(colocated, "y" * 1900)
    server.wait_recovered(victim)


@pytest.mark.parametrize(
    ("what", "roles"),
    [("decode-0", ["decode"]), pytest.param("--rolling", ["prefill", "decode"], marks=pytest.mark.slow)],
)
def test_a_restart_of_workers_fails_no_answer(server: Server, colocated: Server, what: str, roles: list[str]) -> None:
    before, everyone = {role: server.worker(role) for role in roles}, worker_ids(server)
    fields = [{"prompt": f"{n}" * (50 + 70 * n), "seed": n, "temperature": 0.8 * (n > 0)} for n in range(2)]
    common: dict[str, Any] = {"model": "tiny", "max_tokens": 1200, "stream": True, "extra_body": {"ignore_eos": True}}
    is_over = threading.Event()

    def ask(one: Server, number: int) -> str:
        with client_of(one) as client:
            chunks = client.completions.create(**common, **fields[number])
            return "".join(chunk.choices[0].text for chunk in chunks)

    def ask_until_over(number: int) -> list[str]:
        """Ask repeatedly. One client always does, so that something runs when a worker leaves.

        The other one leaves most of the time to a worker that starts.
        """
        texts = [ask(server, number)]
        while not is_over.wait(0.0 if number or worker_ids(server) == everyone else 3.0):
            texts.append(ask(server, number))
        return texts

    with ThreadPoolExecutor(len(fields)) as threads:
        undisturbed = list(threads.map(lambda number: ask(colocated, number), range(len(fields))))
        asking = [threads.submit(ask_until_over, number) for number in range(len(fields))]
        try:
            command = [sys.executable, "-m", "tandem", "restart", what, "--url", server.url]
            restarted = subprocess.run(command, capture_output=True, text=True, timeout=200)
        finally:
            is_over.set()
        answers = [one.result() for one in asking]
    assert restarted.returncode == 0, restarted.stderr
    print(restarted.stderr, f"{sum(map(len, answers))} answers")
    assert [set(texts) for texts in answers] == [{text} for text in undisturbed]
    for worker in before.values():
        server.wait_recovered(worker)
    assert all(server.worker(role)["pid"] != worker["pid"] for role, worker in before.items())
    assert 'tandem_request_moves_total{cause="drain"}' in HTTP.get(f"{server.url}/metrics").text


def test_ctrl_c_ends_one_of_two_servers_and_all_it_started(server: Server, colocated: Server) -> None:
    children = server.children()
    assert len(children) > 3
    assert server.stop() == 0
    assert "Traceback" not in server.output
    assert complete(colocated, "the other one is untouched")


def test_a_server_that_no_worker_is_left_for_ends_with_the_reason(colocated: Server) -> None:
    children = colocated.children()
    psutil.Process(colocated.worker("colocated")["pid"]).kill()
    assert colocated.wait_ended(children) not in (0, None)
    assert "no worker is left that could serve: colocated-0 died 1 times" in colocated.output
