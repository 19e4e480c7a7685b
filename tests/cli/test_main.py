import inspect
import socket
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer import rich_utils

from tandem.__main__ import main
from tandem.cli.main import ALIASES, run
from tandem.cli.serve import SERVE_FIELDS, build_config, serve
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.config import (
    ClusterConfig,
    EngineConfig,
    ManagedEngineConfig,
    RouterConfig,
    TierConfig,
    TransferConfig,
)
from tandem.protocol.settings import settings_of
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tests.support.keys import make_key_file

CONFIGS = [EngineConfig, ManagedEngineConfig, TransferConfig, TierConfig, RouterConfig, ClusterConfig]
FLAGS = inspect.signature(serve).parameters


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_a_flag_with_the_same_default(config: Any) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for field in settings_of(config):
        if field.setting.command == "route":
            assert field.name not in FLAGS
            continue
        default = FLAGS[field.name].default
        assert (tuple(default) if isinstance(default, list) else default) == defaults[field.name]


def test_every_flag_is_a_config_field() -> None:
    names = {field.name for config in CONFIGS for field in settings_of(config)}
    assert set(FLAGS) - names == {"ctx", "config", "tenants", "api_key_file"}  # files are read at once


def test_serve_hands_every_flag_to_the_launcher(model: Path, launched: list[ClusterConfig]) -> None:
    words = f"--model {model} --prefill 2 --decode 3 --port 0 --pool-bytes 5000000 --no-autoscale --gpus-per-worker 0.5"
    more = "--block-size 32 --dtype float32 --checksums all --cors-allow-origins http://a --cors-allow-origins http://b"
    more += " --routing kv,pairs"
    assert run(["serve", *words.split(), *more.split()]) == 7
    assert launched == [
        ClusterConfig(
            engine=EngineConfig(
                model=str(model), served_model_name="toy", block_size=32, dtype="float32", pool_bytes=5_000_000
            ),
            transfer=TransferConfig(checksums="all"),
            router=RouterConfig(port=0, cors_allow_origins=("http://a", "http://b"), routing="kv,pairs"),
            num_prefill=2,
            num_decode=3,
            autoscale=False,
            num_gpus_per_worker=0.5,
        )
    ]


def test_tenants_and_keys_are_read_at_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def launch(_: ClusterConfig, *others: object) -> int:
        given.extend(others)
        return 0

    monkeypatch.setitem(sys.modules, "tandem.cluster.serve", types.SimpleNamespace(serve=launch))
    tenants, keys = tmp_path / "tenants.toml", make_key_file(tmp_path / "keys", {"sk-1": "search"})
    tenants.write_text("[tenants.search]\nweight = 4.0\n")
    flags = ("--tenants", str(tenants), "--api-key-file", str(keys), "--model", str(model))
    assert run(["serve", "--port", "0", *flags]) == 0
    policies, key_file, name, settings = given
    assert settings == {"--model": str(model), "--port": "0"}, "nothing that the machine fills in"
    assert (policies, name) == (Tenants(named={"search": TenantPolicy(weight=4.0)}), str(model))
    assert isinstance(key_file, KeyFile)
    assert [key.tenant for key in key_file.api_keys.all] == ["search"]


def test_no_flag_means_the_defaults_of_the_config() -> None:
    flags = {name: parameter.default for name, parameter in FLAGS.items() if name != "ctx"}
    assert (
        build_config(flags | {"model": "m"})
        == ClusterConfig(engine=EngineConfig(model="m"))
        == build_config({"model": "m"})
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve --max-model-len 1", "max_model_len=1 must be 0, or from 2 to 16777216"),
        ("serve --port 70000", "port=70000 must be from 0 to 65535"),
        ("serve --port x", "port='x' must be a whole number from 0 to 65535. See: tandem serve --help"),
        ("serve --lease-ttl-s=", "lease_ttl_s='' must be a number above 0 and at most 86400 seconds"),
        ("bench --seed x", "seed='x': Input should be a valid integer"),
        ("add", "Missing argument 'role'. Choose from: prefill, decode. See: tandem add --help"),
        ("add num-decode", "'num-decode' is not one of 'prefill', 'decode'. See: tandem add --help"),
        ("drain", "Missing argument 'worker'. See: tandem drain --help"),
        ("keys create --bogus", "No such option: --bogus. See: tandem keys create --help"),
        ("serve --prefil 2", "No such option: --prefil; did you mean --prefill or --num-prefill? See: "),
        ("serve --no-autoscal", "No such option: --no-autoscal; did you mean --no-autoscale or --autoscale? See: "),
        ("bench --prefil 2", "No such option: --prefil. See: tandem bench --help"),
        ("serve --port", "Option '--port' requires an argument. See: tandem serve --help"),
        ("keys create --file", "Option '--file' requires an argument. See: tandem keys create --help"),
        ("srve", "No such command 'srve'. Did you mean 'serve'? See: tandem --help"),
        ("serve --prefill 0", "num_prefill=0 must be at least 1, or 0 with --colocated"),
        ("serve --colocated --prefill 2", "leave out num_prefill=2"),
        ("serve --num-decode 1 --colocated", "leave out num_decode=1"),
        ("serve --decode-parallel-size 2 --colocated", "leave out decode_parallel_size=2"),
        ("serve --kv-key-file /no/such/key", "kv_key_file=/no/such/key does not exist; make it with: "),
        ("serve --disk-cache-path /dev/null/a", "/dev/null/a cannot be a folder: /dev/null is not one"),
        ("serve --disk-cache-path /proc/kv", "disk_cache_path: /proc/kv cannot be written to: /proc takes no folders"),
        ("serve --eviction-policy lru", "No such option: --eviction-policy. See: tandem serve --help"),
        ("serve --object-cache-url s4://bucket", "object_cache_url: 's4' is unknown; choose one of abfs, "),
        ("serve --tier acme://pool?gb=1", "tier='acme://pool?gb=1': 'acme' is unknown; choose one of abfs, "),
        ("serve --tier disk:/kv", "tier='disk:/kv' has no size: say how many GB it may hold, as gb=64"),
        ("serve --tier host:1GB --tier host:2GB", "are both named 'host'; give one of them another name"),
        ("serve --tier disk:/proc/kv?gb=1", "tier='disk:/proc/kv?gb=1': /proc/kv cannot be written to"),
        ("serve --tier disk:/tmp?gb=1&codec=zip", "codec='zip' must be one of raw, "),
        ("serve --tier numa:77?gb=1", "there is no NUMA node 77 with memory; choose one of 0"),
        ("serve --tier host:1GB?size=1", "size='1' is no option of host; it takes gb, name, codec, eviction"),
        ("serve --transport pigeon", "transport='pigeon': 'pigeon' is unknown; choose one of nccl, nixl"),
        ("serve --transport in_process", "'in_process' is unknown; choose one of nccl, nixl, or install"),
        ("serve --object-cache-url file://kv/a", "names the host 'kv'; a folder has three slashes: file:///kv/a"),
        (
            "serve --port 0 --model ~nobody-here/a",
            "model='~nobody-here/a' names the home folder of an unknown user",
        ),
        (f"serve --port 0 --model {'m' * 300}", "is neither a folder here, a hub id"),
        ("serve --served-model-name \udcff", "served_model_name='\\udcff' must be text in UTF-8"),
        ("serve --tenants ~nobody-here/a", "tenants='~nobody-here/a' names the home folder of an unknown user"),
        ("serve --worker-timeout-s 1.5", "worker_timeout_s=1.5 must be at least two heartbeats, which come every 1 s"),
        ("serve --ray-address head", "ray_address='head' must be host:port"),
        ("serve --host a..b", "host='a..b' is not a host name"),
        ("serve --host \udcff", "host='\\udcff' must be text in UTF-8"),
        ("serve --port 0 --model /no/such/folder", "model folder /no/such/folder does not exist"),
        ("serve --port 0 --model nonsense", "model='nonsense' is neither"),
        ("model pull nonsense", "model='nonsense' is neither"),
        ("bench --concurrency 1,x", "concurrency='1,x'"),
        ("bench --url ftp://x", "url='ftp://x'"),
        ("bench --url http://a..b", "url='http://a..b' is not of the form http://host:port: "),
        ("bench --url http://a:99999", "url='http://a:99999' is not of the form http://host:port: "),
        ("chat --url http://a..b", "url='http://a..b' is not of the form http://host:port"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], launched: list[ClusterConfig]
) -> None:
    assert run(words.split()) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert len(captured.err.splitlines()) == 1
    assert (captured.out, launched) == ("", [])


def test_a_busy_port_is_reported_first(
    model: Path, capsys: pytest.CaptureFixture[str], launched: list[ClusterConfig]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["serve", "--port", str(port), "--model", str(model)]) == 2
    assert f"port={port} (Address already in use)" in capsys.readouterr().err
    assert launched == []


def test_a_wrong_model_and_a_busy_port_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["serve", "--port", str(port), "--model", "/no/such/folder"]) == 2
    assert capsys.readouterr().err == (
        f"tandem: model folder /no/such/folder does not exist; and cannot listen on host=127.0.0.1 port={port} "
        "(Address already in use); choose another with --port or --host\n"
    )


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["route"], ["chat"], ["bench"], ["replay"], ["model"], ["model", "pull"], ["version"]]
)
def test_help_is_there_for_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage: tandem" in capsys.readouterr().out


def test_help_shows_every_flag_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    assert run(["serve", "--help"]) == 0
    output = capsys.readouterr().out
    assert "…" not in output
    for field in SERVE_FIELDS:
        assert all(f"{flag} " in output for flag in field.flag.split("/"))
    assert "--config " in output
    for alias in ALIASES:
        assert f"--{alias}" in output


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_names_the_distribution(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == 0
    assert capsys.readouterr().out.startswith("tandem 0.")


def test_a_name_like_markup_is_shown(
    model: Path, capsys: pytest.CaptureFixture[str], launched: list[ClusterConfig]
) -> None:
    assert run(["serve", "--port", "0", "--model", "[/x]"]) == 2
    assert "model='[/x]' is neither a folder here" in capsys.readouterr().err
    folder = model.rename(model.parent / "[red]toy")
    assert run(["serve", "--port", "0", "--model", str(folder)]) == 7
    assert launched[0].engine.served_model_name == "[red]toy"


def test_ctrl_c_while_the_command_is_imported_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        """Stands for the import of the command, in which the user presses Ctrl-C."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "tandem.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tandem.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
