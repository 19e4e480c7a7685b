from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.main import run
from tandem.protocol.config import ClusterConfig, EngineConfig, RouterConfig, TransferConfig
from tests.support.keys import make_key_file


def write(folder: Path, text: str) -> str:
    path = folder / "tandem.toml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_files_which_win_over_defaults(
    tmp_path: Path, model: Path, launched: list[ClusterConfig]
) -> None:
    path = write(
        tmp_path,
        f"""
        model = "{model}"
        port = 0
        num_decode = 3
        autoscale = false
        lease_ttl_s = 20
        allowed_hosts = ["a.example", "b.example"]
        block_size = 32
        """,
    )
    assert run(["serve", "--config", path, "--decode", "2", "--autoscale", "--allowed-hosts", "c.example"]) == 7
    assert launched == [
        ClusterConfig(
            engine=EngineConfig(model=str(model), served_model_name="toy", block_size=32),
            transfer=TransferConfig(lease_ttl_s=20.0),
            router=RouterConfig(port=0, allowed_hosts=("c.example",)),
            num_decode=2,
            autoscale=True,
        )
    ]


def test_a_flag_with_the_default_value_wins_too(tmp_path: Path, model: Path, launched: list[ClusterConfig]) -> None:
    path = write(tmp_path, f'model = "{model}"\nport = 0\nnum_decode = 3\n')
    assert run(["serve", "--config", path, "--num-decode", "1"]) == 7
    assert launched[0].num_decode == 1


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("num_prefill = 2", ["--colocated"], {"colocated": True, "num_prefill": 1}),
        ("num_prefill = 2", ["--no-colocated"], {"colocated": False, "num_prefill": 2}),
        ("colocated = true", ["--no-colocated", "--prefill", "2"], {"colocated": False, "num_prefill": 2}),
    ],
)
def test_a_flag_also_wins_over_settings_that_exclude_it(
    text: str, flags: list[str], expected: dict[str, object], tmp_path: Path, model: Path, launched: list[ClusterConfig]
) -> None:
    path = write(tmp_path, f'model = "{model}"\nport = 0\n{text}\n')
    assert run(["serve", "--config", path, *flags]) == 7
    assert {name: getattr(launched[0], name) for name in expected} == expected


@pytest.mark.parametrize("is_in_file", [False, True])
def test_paths_in_the_file_and_in_flags_may_begin_with_the_home_folder(
    tmp_path: Path, model: Path, launched: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch, is_in_file: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_key_file(tmp_path / "keys", {"sk-1": "default"})
    paths = 'api_key_file = "~/keys"\ndisk_cache_path = "~/kv"\n'
    write(tmp_path, 'model = "~/toy"\nport = 0\n' + paths * is_in_file)
    flags = [] if is_in_file else ["--api-key-file=~/keys", "--disk-cache-path=~/kv"]
    assert run(["serve", "--config=~/tandem.toml", *flags]) == 7
    assert launched[0].tiers.disk_cache_path == str(tmp_path / "kv")


def test_each_node_of_a_cluster_expands_the_paths_of_its_own_tiers(model: Path, launched: list[ClusterConfig]) -> None:
    flags = ("--model", str(model), "--port=0", "--ray-address=127.0.0.1:6379")
    assert run(["serve", *flags, "--disk-cache-path=~/kv", "--kv-key-file=~/key"]) == 7
    assert (launched[0].tiers.disk_cache_path, launched[0].tiers.kv_key_file) == ("~/kv", "~/key")


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        ("serve", "prot = 8000", "{path}: unknown key 'prot' with value 8000; did you mean 'port'?"),
        ("serve", "num-decode = 2", "{path}: unknown key 'num-decode' with value 2; did you mean 'num_decode'?"),
        ("serve", "prefill = 2", "{path}: unknown key 'prefill' with value 2; did you mean 'num_prefill'?"),
        ("serve", "zzz = 1", "{path}: unknown key 'zzz' with value 1; keys are the names of flags, with _ for -"),
        ("serve", "[router]\nport = 1", "{path}: unknown key 'router' with value {{'port': 1}}; write all settings at"),
        ("serve", 'config = "a"', "{path}: unknown key 'config' with value 'a'; "),
        ("route", "num_decode = 2", "{path}: unknown key 'num_decode' with value 2; "),
        ("route", "pin_share = 0.1", "{path}: unknown key 'pin_share' with value 0.1; "),
        ("serve", 'port = "80"', "{path}: port='80' must be a whole number from 0 to 65535"),
        ("serve", "port = 70000", "{path}: port=70000 must be from 0 to 65535"),
        ("serve", "lease_ttl_s = nan", "{path}: lease_ttl_s=nan must be above 0 and at most 86400 seconds"),
        ("serve", 'allowed_hosts = "a"', "{path}: allowed_hosts='a' must be a list of strings"),
        ("serve", "colocated = true\nnum_decode = 2", "leave out num_decode=2"),
        ("serve", "worker_timeout_s = 1.0", "worker_timeout_s=1.0 must be at least two heartbeats, which come"),
        ("serve", 'model = "\\u0000"', "{path}: model='\\x00' must be text in UTF-8 without the character \\0"),
        ("serve", 'served_model_name = "a "', "{path}: served_model_name='a ' must be printable characters, without"),
        ("route", 'tenants = "\\u0000"', "{path}: tenants='\\x00' must be text in UTF-8 without the character \\0"),
        ("serve", "port = " + "9" * 5000, "config='{path}' is not valid TOML: Exceeds the limit"),
        ("serve", "port = " + "[" * 5000, "config='{path}' is not valid TOML: maximum recursion depth"),
        ("serve", 'kv_key_file = "~nobody-here/a"', "kv_key_file='~nobody-here/a' names the home folder of an unknown"),
        ("serve", "a = ", "config='{path}' is not valid TOML: "),
        ("serve", "port = 1\nport = 2", "config='{path}' is not valid TOML: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(
    command: str,
    text: str,
    expected: str,
    tmp_path: Path,
    launched: list[ClusterConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, text)
    assert run([command, "--config", path]) == 2
    error = capsys.readouterr().err
    assert expected.format(path=path) in error
    assert error.count("\n") == 1
    assert launched == []


def test_the_line_is_short_and_shows_no_raw_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f'prot = "\\u001b[31m{"x" * 100_000}"\n')
    assert run(["serve", "--config", path]) == 2
    error = capsys.readouterr().err
    assert "prot" in error
    assert "did you mean 'port'?" in error
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert len(error) < 2000


def test_a_byte_order_mark_is_not_part_of_the_file(tmp_path: Path, model: Path, launched: list[ClusterConfig]) -> None:
    path = write(tmp_path, f'\ufeffmodel = "{model}"\nport = 0\n')
    assert run(["serve", "--config", path]) == 7
    assert launched


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, reason in (
        (tmp_path / "none", "cannot be read: No such file or directory; give a file that this user can read"),
        (tmp_path, "cannot be read: Is a directory; give a file that this user can read"),
        (binary, "is not UTF-8 text (see byte 0); save it as UTF-8"),
        ("", "cannot be read: No such file or directory; give a file that this user can read"),
        ("/dev/zero", "has more than 16777216 characters; give a smaller file"),
    ):
        assert run(["serve", "--config", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"config={str(path)!r} {reason}" in error
        assert error.count("\n") == 1
