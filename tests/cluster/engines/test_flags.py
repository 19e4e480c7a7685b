from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.engines import vllm
from tandem.cluster.engines.server import Parallelism, Sockets, flags_of
from tandem.cluster.worker_layout import preload_of
from tandem.protocol.config import TierConfig
from tandem.protocol.errors import ConfigError
from tests.support.managed import engine_server

SERVER = engine_server(worker_id="decode-0", arguments=("--max-model-len", "4096"), cpu_cores=(2, 3))
SOCKETS = Sockets(8001, 5600, "ipc:///run/events", "ipc:///run/replay")


def test_flags_are_found_in_every_spelling() -> None:
    words = ["--max_model_len=10", "--seed", "-1", "-tp", "2", "--enforce-eager", "--a.b_c", "x"]
    found = {"--max-model-len": "10", "--seed": "-1", "-tp": "2", "--enforce-eager": None, "--a.b_c": "x"}
    assert list(flags_of(words)) == list(found.items())


@pytest.mark.parametrize(
    "arguments",
    [
        *("--port 8000", "--port=8000", "--served_model_name x", "--api-key x", "--config file.yaml", "--grpc"),
        *("--kv-transfer-config {}", "--kv-transfer-config.kv_role kv_producer", "--kv-transfer {}"),
        *("--kv_events_config={}", "--kv-offloading-size 4", "-dpr 1", "-dpn 0", "-n 2", "-n2"),
        "--max-model-len 10 --model other",
    ],
)
def test_flags_that_tandem_sets_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_args: -.* is set by Tandem for each vLLM server; "):
        vllm.check(arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "10", "--quantization", "fp8", "--enable-lora", "-O3", "--model-impl", "auto"],
        ["--data-parallel-size", "8", "--data_parallel_size=8", "-tp", "2"],
        ["--seed", "-1", "--hf-overrides", '{"a b": 1}'],
    ],
)
def test_other_flags_are_passed_on_as_they_are(arguments: list[str]) -> None:
    vllm.check(arguments)
    command = vllm.command(replace(SERVER, arguments=tuple(arguments)), SOCKETS)
    assert command[-len(arguments) :] == arguments


def test_ranks_are_counted() -> None:
    ranks = vllm.parallelism(["--tensor_parallel_size=4", "-pp", "2", "--data-parallel-size", "3"])
    assert (ranks, ranks.num_gpus) == (Parallelism(4, 2, 3), 24)
    assert vllm.parallelism([]).num_gpus == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "1e3", "99999"])
def test_a_number_of_ranks_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"-tp .*must be a whole number from 1 to 4096"):
        vllm.parallelism([f"-tp={value}"])


def test_a_server_publishes_events_and_hands_kv_over() -> None:
    words = vllm.command(SERVER, SOCKETS)
    assert words[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[-2:] == ["--max-model-len", "4096"]
    options = dict(itertools.pairwise(words))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8001")
    assert (options["--model"], options["--served-model-name"]) == ("/models/m", "toy")
    events = json.loads(options["--kv-events-config"])
    assert (events["endpoint"], events["replay_endpoint"]) == (SOCKETS.events, SOCKETS.replay)
    connector = json.loads(options["--kv-transfer-config"])
    assert connector == {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def test_a_server_with_gpus_keeps_kv_there_and_one_alone_hands_over_none() -> None:
    on_gpu = vllm.command(replace(SERVER, num_gpus=1.0), SOCKETS)
    assert "kv_buffer_device" not in on_gpu[on_gpu.index("--kv-transfer-config") + 1]
    assert "--kv-transfer-config" not in vllm.command(replace(SERVER, is_disaggregated=False), SOCKETS)


def connector_of(**fields: Any) -> dict[str, Any]:
    options = dict(itertools.pairwise(vllm.command(replace(SERVER, num_gpus=1.0, **fields), SOCKETS)))
    return json.loads(options.get("--kv-transfer-config", "{}"))  # type: ignore[no-any-return]


def test_tiers_are_offloaded_to_alone_and_beside_nixl() -> None:
    alone = connector_of(is_disaggregated=False, host_cache_bytes=64 * 10**9, disk_cache_path="~/kv")
    assert (alone["kv_connector"], alone["kv_role"]) == ("OffloadingConnector", "kv_both")
    extra = alone["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 64 * 10**9)
    assert extra["secondary_tiers"] == [
        {"type": "fs", "root_dir": str(Path.home() / "kv"), "enable_kv_events": True, "locality": "LOCAL"}
    ]
    assert (extra["blocks_per_chunk"], extra["self_describing_kv_events"]) == (1, True)
    assert extra["offload_prompt_only"] is False
    assert (
        connector_of(is_disaggregated=False, host_cache_bytes=1)["kv_connector_extra_config"]["secondary_tiers"] == []
    )

    both = connector_of(host_cache_bytes=64 * 10**9, disk_cache_path="~/kv")
    assert both["kv_connector"] == "MultiConnector"
    first, second = both["kv_connector_extra_config"]["connectors"]
    assert (first, second) == ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, alone)


@pytest.mark.parametrize(
    ("tiers", "has_gpus", "error"),
    [
        (TierConfig(disk_cache_path="/ssd"), True, "disk_cache_path='/ssd'.*give host_cache_gb too"),
        (TierConfig(host_cache_gb=64.0), False, "host_cache_gb=64: vLLM offloads KV of GPUs only"),
    ],
)
def test_tiers_that_vllm_does_not_have_are_refused(tiers: TierConfig, has_gpus: bool, error: str) -> None:
    vllm.check_tiers(TierConfig(host_cache_gb=64.0, disk_cache_path="/ssd"), has_gpus=True)
    vllm.check_tiers(TierConfig(), has_gpus=False)
    with pytest.raises(ConfigError, match=error):
        vllm.check_tiers(tiers, has_gpus=has_gpus)


def test_the_name_of_host_memory_is_removed_for_this_life_of_the_server_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "SHARED_MEMORY", tmp_path)
    names = ["vllm_offload_ab.mmap", "vllm_offload_ab_dp1.mmap", "vllm_offload_cd.mmap", "other"]
    for name in names:
        (tmp_path / name).touch()
    vllm.release(SOCKETS)  # its engine has a name of its own
    assert len(list(tmp_path.iterdir())) == 4
    vllm.release(SOCKETS._replace(engine_id="ab"))
    assert {file.name for file in tmp_path.iterdir()} == set(names[2:])
    command = vllm.command(SERVER, SOCKETS._replace(engine_id="ab"))
    assert json.loads(command[command.index("--kv-transfer-config") + 1])["engine_id"] == "ab"


def test_servers_that_share_a_gpu_share_its_memory() -> None:
    half = vllm.command(replace(SERVER, num_gpus=0.5), SOCKETS)
    assert half[half.index("--gpu-memory-utilization") + 1] == "0.450"
    own = vllm.command(replace(SERVER, num_gpus=0.5, arguments=("--gpu_memory_utilization=0.3",)), SOCKETS)
    assert "--gpu-memory-utilization" not in own
    assert "--gpu-memory-utilization" not in vllm.command(replace(SERVER, num_gpus=1.0), SOCKETS)


def test_the_key_is_in_the_environment_and_not_on_the_command_line() -> None:
    variables = vllm.environment(SERVER, SOCKETS)
    assert (variables["VLLM_API_KEY"], variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("secret", "5600")
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "secret" not in " ".join(vllm.command(SERVER, SOCKETS))
    assert "secret" not in repr(SERVER)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in vllm.environment(replace(SERVER, num_gpus=1.0), SOCKETS)


def test_intels_openmp_is_preloaded_where_the_environment_has_it(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    assert preload_of(python) == {}
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert preload_of(python) == {"LD_PRELOAD": str(library)}
    assert vllm.defaults(replace(SERVER, python=python))["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in vllm.defaults(replace(SERVER, python=python, num_gpus=1.0))


def test_endpoints_are_reached_at_the_servers_host() -> None:
    sockets = Sockets(1, 2, "tcp://*:5557", "ipc:///x")
    assert sockets.reached_at(sockets.events, "fd00::1") == "tcp://[fd00::1]:5557"
    assert sockets.reached_at(sockets.replay, "10.0.0.1") == "ipc:///x"
