from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse

from tandem.cluster.engines import sglang
from tandem.cluster.engines.actor import EngineActor, EngineEnd, EngineStarted
from tandem.cluster.engines.dialect import dialect_of
from tandem.cluster.engines.role_switch import RoleIsLost, switch_role
from tandem.cluster.engines.server import Parallelism, Sockets
from tandem.protocol.config import TierConfig
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import Role
from tandem.router.engines.config import spec_from
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.managed import engine_python, engine_server

SWITCHABLE = ("--disaggregation-transfer-backend", "mooncake", "--enable-pd-role-switch")
SERVER = engine_server(kind="sglang", arguments=("--context-length", "4096"), num_gpus=1.0, role=Role.PREFILL)
SOCKETS = Sockets(8001, 8998, "ipc:///run/events", "ipc:///run/replay")


def options(**fields: Any) -> dict[str, str]:
    return dict(itertools.pairwise(sglang.command(replace(SERVER, **fields), SOCKETS)))


# -- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        *("--model x", "--model-path=x", "--model_path x", "--port 1", "--api-key x", "--config x.yaml"),
        *("--disaggregation-mode prefill", "--disaggregation-boot 1", "--kv_events_config={}"),
        *("--nccl-init-addr h:1", "--device cuda"),
    ],
)
def test_flags_that_tandem_sets_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_args: --\S+ is set by Tandem for each SGLang server; "):
        sglang.check(arguments.split())


def test_other_flags_are_passed_on_as_they_are() -> None:
    arguments = ["--tp", "2", "--quantization", "fp8", "--enable-lora", "--page-size", "64", *SWITCHABLE]
    sglang.check(arguments)
    command = sglang.command(replace(SERVER, arguments=tuple(arguments)), SOCKETS)
    assert command[-len(arguments) :] == arguments


def test_a_role_switch_that_the_server_would_refuse_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="does not work with the transfer backend nixl"):
        sglang.check(["--enable-pd-role-switch"])


@pytest.mark.parametrize(
    ("arguments", "ranks", "num_gpus", "num_caches"),
    [
        ([], Parallelism(), 1, 1),
        (["--tp", "4", "--pp-size", "2"], Parallelism(4, 2), 8, 1),
        (["--tensor-parallel-size=2", "--dp-size", "3"], Parallelism(2, 1, 3), 6, 3),
        (["--tp-size", "8", "--dp", "4", "--enable-dp-attention"], Parallelism(8, 1, 1, 4), 8, 4),
        (["--tp", "8", "--attn-dp-size", "8"], Parallelism(8, 1, 1, 8), 8, 8),
    ],
)
def test_ranks_of_attention_share_gpu(arguments: list[str], ranks: Parallelism, num_gpus: int, num_caches: int) -> None:
    found = sglang.parallelism(arguments)
    assert (found, found.num_gpus, found.num_caches) == (ranks, num_gpus, num_caches)


def test_a_server_is_started_in_the_mode_of_its_role() -> None:
    words = sglang.command(SERVER, SOCKETS)
    assert words[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    assert words[-2:] == ["--context-length", "4096"]
    prefill = options()
    assert (prefill["--model-path"], prefill["--served-model-name"]) == ("/models/m", "toy")
    assert (prefill["--disaggregation-mode"], prefill["--disaggregation-bootstrap-port"]) == ("prefill", "8998")
    assert (prefill["--disaggregation-transfer-backend"], prefill["--page-size"]) == ("nixl", "16")
    events = json.loads(prefill["--kv-events-config"])
    assert events == {"publisher": "zmq", "endpoint": SOCKETS.events, "replay_endpoint": SOCKETS.replay}
    assert options(role=Role.DECODE)["--disaggregation-mode"] == "decode"
    assert "--disaggregation-mode" not in options(role=Role.COLOCATED)
    assert "--device" not in prefill
    assert prefill["/health"] == "/metrics"  # not in the log
    assert options(num_gpus=0.0)["--device"] == "cpu"


def test_what_the_user_gave_is_given_once() -> None:
    words = sglang.command(replace(SERVER, arguments=("--page_size=64", *SWITCHABLE)), SOCKETS)
    assert "--page-size" not in words
    assert words.count("--disaggregation-transfer-backend") == 1


def test_hicache_keeps_what_the_pool_evicts_where_prefixes_are_kept() -> None:
    tiers = {"host_cache_bytes": 64 * 10**9, "disk_cache_path": "~/kv", "disk_cache_bytes": 10**12}
    for role in (Role.PREFILL, Role.COLOCATED):
        words = sglang.command(server := replace(SERVER, role=role, **tiers), SOCKETS)
        assert words[words.index("--enable-hierarchical-cache") :][:5] == [
            *("--enable-hierarchical-cache", "--hicache-size", "64", "--hicache-storage-backend", "file")
        ]
        variables = sglang.environment(server, SOCKETS)
        assert variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(Path.home() / "kv")
        assert variables["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] == str(10**12)
    decode = replace(SERVER, role=Role.DECODE, **tiers)
    assert "--enable-hierarchical-cache" not in sglang.command(decode, SOCKETS)
    assert not any("HICACHE" in name for name in sglang.environment(decode, SOCKETS))
    assert "--hicache-storage-backend" not in options(host_cache_bytes=10**9)


@pytest.mark.parametrize(
    ("ranks", "gb", "size"),
    [
        (Parallelism(4), 64, "16"),
        (Parallelism(2, 1, 2), 32, "16"),
        (Parallelism(8, 1, 1, 4), 16, "8"),
        (Parallelism(4), 2, "1"),
    ],
)
def test_each_rank_has_its_part_of_host_memory(ranks: Parallelism, gb: int, size: str) -> None:
    assert options(parallelism=ranks, host_cache_bytes=gb * 10**9)["--hicache-size"] == size


@pytest.mark.parametrize(
    ("tiers", "has_gpus", "error"),
    [
        (TierConfig(disk_cache_path="/ssd"), True, "disk_cache_path='/ssd'.*an SGLang server.*give host_cache_gb too"),
        (TierConfig(host_cache_gb=64.0), False, "host_cache_gb=64: SGLang's HiCache keeps KV of GPUs only"),
    ],
)
def test_tiers_that_sglang_does_not_have_are_refused(tiers: TierConfig, has_gpus: bool, error: str) -> None:
    sglang.check_tiers(TierConfig(host_cache_gb=64.0, disk_cache_path="/ssd"), has_gpus=True)
    with pytest.raises(ConfigError, match=error):
        sglang.check_tiers(tiers, has_gpus=has_gpus)


def test_the_key_is_in_a_file_and_not_on_the_command_line() -> None:
    assert sglang.config(SERVER) == 'api-key: "secret"\n'
    assert "secret" not in " ".join(sglang.command(SERVER, SOCKETS))
    assert "secret" not in str(sglang.environment(SERVER, SOCKETS))


def test_a_role_is_fixed_unless_the_server_can_switch() -> None:
    dialect = dialect_of("sglang")
    assert "--enable-pd-role-switch" in dialect.fixed_role(SERVER)
    assert dialect.fixed_role(replace(SERVER, arguments=SWITCHABLE)) == ""
    assert dialect_of("vllm").fixed_role(replace(SERVER, kind="vllm")) == ""


# -- the start ------------------------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, role: Role) -> Iterator[EngineStarted]:
    server = replace(
        SERVER,
        python=str(engine_python(folder, "fake_sglang")),
        role=role,
        num_gpus=0.0,
        log_folder=str(folder / "logs"),
    )
    actor = EngineActor(server)
    started = actor.start()
    try:
        assert isinstance(started, EngineStarted), started
        yield started
    finally:
        actor.stop()


@pytest.mark.cluster
@pytest.mark.parametrize(("role", "mode"), [(Role.DECODE, "decode"), (Role.COLOCATED, "null")])
def test_a_server_with_or_without_a_peer_starts(tmp_path: Path, role: Role, mode: str) -> None:
    with running(tmp_path, role) as started:
        body = {"model": "toy", "prompt": "a b", "max_tokens": 2}
        headers = {"authorization": "Bearer secret"}
        url = f"{started.url}/v1/completions"
        assert httpx.post(url, json=body).status_code == 401
        alone = httpx.post(url, json=body, headers=headers)
        assert alone.status_code == (200 if role is Role.COLOCATED else 400)
        assert started.side_channel_port
    assert f"serving toy in mode {mode}" in (tmp_path / "logs" / "prefill-0.log").read_text()


def test_a_server_that_ends_itself_by_force_is_reported_by_its_error(tmp_path: Path) -> None:
    arguments = ("--fake-error=AssertionError: Torch not compiled with CUDA enabled",)
    end = EngineActor(replace(SERVER, python=str(engine_python(tmp_path, "fake_sglang")), arguments=arguments)).start()
    assert isinstance(end, EngineEnd)
    error = "AssertionError: Torch not compiled with CUDA enabled"
    assert end.reason == f"sglang was ended by signal 9; its last error: {error}"


# -- the switch of roles --------------------------------------------------------------------------------------


@contextmanager
def switching(*answers: tuple[int, dict[str, Any]]) -> Iterator[FakeServer]:
    """A server that gives these answers to requests for another role."""
    left = iter(answers)

    def answer(*_: object) -> JSONResponse:
        status, content = next(left)
        return JSONResponse(content, status)

    with fake_openai() as fake:
        fake.replies["/pd_role_switch"] = answer
        yield fake


def spec(fake: FakeServer) -> Any:
    return spec_from({"name": "p", "url": fake.url, "kind": "sglang", "headers": {"authorization": "Bearer k"}}, "test")


async def test_a_server_that_is_not_idle_yet_is_asked_again() -> None:
    busy = (400, {"success": False, "message": "instance is not idle; drain", "safe_to_restore": True})
    with switching(busy, (200, {"success": True, "message": "ok"})) as fake:
        await switch_role(spec(fake), Role.PREFILL, None)
        assert (fake.requests, fake.authorization) == ([{"new_role": "prefill"}] * 2, ["Bearer k"] * 2)


async def test_a_server_that_will_decode_is_told_the_size_of_the_graphs() -> None:
    state = {"decode_cuda_graph_memory_gb": 1.5, "decode_cuda_graph_bs": [1, 2]}
    with switching((200, {"success": True})) as fake, fake_openai() as peer:
        peer.replies["/server_info"] = lambda *_: JSONResponse({"internal_states": [state]})
        await switch_role(spec(fake), Role.DECODE, spec(peer))
        assert fake.requests == [{"new_role": "decode"} | state]


@pytest.mark.parametrize(
    ("status", "content", "error", "reason"),
    [
        (400, {"success": False, "message": "no", "safe_to_restore": True}, WorkerError, "refused to become a decode"),
        (404, {"detail": "Not Found"}, WorkerError, "cannot switch roles: it answered 404"),
        (400, {"success": False, "message": "torn", "safe_to_restore": False}, RoleIsLost, "failed to become"),
        (500, {"what": "ever"}, RoleIsLost, "failed to become"),
    ],
)
async def test_a_refusal_is_not_a_failure(
    status: int, content: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with switching((status, content)) as fake:
        with pytest.raises(error, match=reason) as raised:
            await switch_role(spec(fake), Role.DECODE, None)
        assert isinstance(raised.value, RoleIsLost) == (error is RoleIsLost)
