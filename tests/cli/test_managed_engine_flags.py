from __future__ import annotations

import sys

import pytest

from tandem.cli.main import run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine=vllm", "--pool-bytes=1"], "pool_bytes=1 is a setting of Tandem's own engine; give vllm its own"),
        (["--engine=vllm", "--checksums=all"], "checksums='all' is a setting of Tandem's own engine"),
        (["--engine=vllm", "--copy-kv-tokens=4"], "copy_kv_tokens=4 is a setting of Tandem's own engine"),
        (
            ["--engine=vllm", "--tier=host:4GB"],
            "tier=['host:4GB'] is a setting of Tandem's own engine; give vllm host_cache_gb and disk_cache_path, or",
        ),
        (["--engine=vllm", "--disk-cache-gb=4"], "disk_cache_gb=4.0 is a setting of Tandem's own engine"),
        (["--engine=vllm", "--disk-cache-path=/tmp"], "disk_cache_path='/tmp': KV of a vLLM server goes to its disk"),
        (["--engine=vllm", "--host-cache-gb=4"], f"but {sys.executable} has no module vllm"),
        (["--engine=sglang", "--host-cache-gb=4"], f"but {sys.executable} has no module sglang"),
        (["--engine=vllm", "--engine-args=--kv-offloading-size 4"], "give tandem serve --host-cache-gb and"),
        (["--engine=vllm", "--engine-start-timeout-s=9"], "No such option: --engine-start-timeout-s"),
        (["--engine=vllm", "--engine-args=--port 1"], "engine_args: --port is set by Tandem for each vLLM server"),
        (["--engine=vllm", "--engine-args=-tp two"], "engine_args: -tp two must be a whole number from 1 to 4096"),
        (["--engine=vllm", "--engine-args='"], "must be a command line whose quotation marks are closed"),
        (["--engine=vllm", "--engine-python=/nowhere/python"], "engine_python='/nowhere/python' is not a file"),
        (["--engine=vllm"], f"engine_kind='vllm', but {sys.executable} has no module vllm: install it there, or name"),
        (["--engine=vllm", "--worker-stall-timeout-s=9"], f"but {sys.executable} has no module vllm"),
        (["--engine=sglang"], f"engine_kind='sglang', but {sys.executable} has no module sglang"),
        (["--engine=vllm", "--engine-python=/dev/null"], "engine_python='/dev/null' is not a file"),
        (["--engine=vllm", f"--engine-python={__file__}"], "cannot be run: Permission denied"),
        (
            ["--engine=vllm", "--gpus-per-worker=2", "--engine-args=-tp 4"],
            "num_gpus_per_worker=2, but a server with these",
        ),
        ([f"--engine-python={sys.executable}"], "is for --engine vllm and sglang; leave it out"),
        (["--engine-args=-tp 4"], "engine_args='-tp 4' is for --engine vllm and sglang; leave it out"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port=0", *flags]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
