"""Run before any test is collected; fixtures that several folders use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tandem.runtime.signals import restore_child_signals
from tests.support.device import prepare_device, skip_what_needs_a_cpu

if TYPE_CHECKING:
    from tandem.text.tokenizer import Tokenizer
    from tests.support.cluster_harness import Oracle
    from tests.support.fake_openai import FakeServer

# Triton decides when it is imported (torch imports it too) whether kernels are compiled or interpreted on the CPU. On a
# machine with a GPU they are compiled, as its engines need.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")

# Property tests take their number of examples from a profile: the same 50 in every run, or, with
# `--hypothesis-profile=thorough`, 1000 others each time. They measure no time: on a busy machine any example may take
# seconds.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _UNTIMED, max_examples=50, derandomize=True)
settings.register_profile("thorough", _UNTIMED, max_examples=1000, print_blob=True)
settings.load_profile("quick")

# Modules and collected tests are millions of objects that stay to the end. The collector looks at none of them.
gc.disable()

restore_child_signals()  # tests stop what they start with SIGINT, and may themselves run as a background job


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, for `-n logical`: tests spend much of their time waiting for something."""
    return (os.cpu_count() or 1) + 1


def pytest_configure() -> None:
    prepare_device()


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_what_needs_a_cpu(item)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests need no mark: `anyio_mode` is "auto"."""
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.toy_tokenizer import build_tokenizer

    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    from tandem.text.tokenizer import Tokenizer

    return Tokenizer(tokenizer_folder)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    from tests.support.fake_openai import fake_openai

    with fake_openai() as fake:
        yield fake


fake_a, fake_b = server, server  # two more, for tests that need several


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_llama import save_tiny_model  # here: torch takes seconds

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    from tests.support.cluster_harness import Oracle

    return Oracle(tiny_model)
