"""Two ranks: the same tokens and KV as one, refusals by name, and what happens when a rank fails or dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from tandem.engine.engine import Engine
from tandem.engine.tensor_parallel.group import RanksLost
from tandem.engine.tensor_parallel.team import Team
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.process import has_ended
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import add, drain, generate, prompt_kv
from tests.support.architectures import SERVED, WRAPPERS
from tests.support.thread_ranks import thread_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.cpu_engine("ranks on one machine need a GPU each")]

DEADLINE_S = 60.0

# Families by what their plans cut: biases, norms of heads, soft caps and scaled embeddings, experts, latent attention,
# fused projections, a layer whose input is cut, towers beside the language model.
FAMILIES = ["llama, tied embeddings and biases", "qwen3", "gemma2", "mixtral", "qwen2_moe", "deepseek_v2", "gpt_neox"]
FAMILIES += ["glm4", "gemma3, multimodal"]
REFUSED = {
    "phi3": "does not divide the 4 attention heads",
    "deepseek_v3": "does not divide the 4 attention heads",
    "gpt_oss": "has no tensor parallel plan",
    "gpt2": "has no tensor parallel plan",
    "gpt_bigcode": "num_key_value_heads=1, which tensor_parallel_size=2 does not divide",
}


def make_prompts(seed: int, lengths: tuple[int, ...] = (3, 17, 40, 61)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 190) for _ in range(length)] for length in lengths]


@contextmanager
def two_ranks(build_engine: BuildEngine, name: str = "llama", **settings: Any) -> Iterator[Engine]:
    """An engine of two ranks that are threads."""
    with thread_ranks():
        engine = build_engine(name, tensor_parallel_size=2, **settings)
    try:
        yield engine
    finally:
        engine.close()


def run_forever(engine: Engine) -> None:
    while True:
        engine.step()


def answers(engine: Engine) -> list[list[list[int]]]:
    return [
        generate(engine, make_prompts(1), max_tokens=12),
        generate(engine, make_prompts(2), max_tokens=12, temperature=1.0, seed=5),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_answer_as_one(build_engine: BuildEngine, name: str) -> None:
    one = build_engine(name)
    with two_ranks(build_engine, name) as engine:
        assert answers(engine) == answers(one)
        assert engine.kv.block_shape == one.kv.block_shape
        assert engine.namespace == one.namespace, "so that each finds what the other has stored"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # transformers fills weights of a wrong shape
@pytest.mark.parametrize("name", sorted(SERVED.keys() | WRAPPERS.keys()))
def test_every_family_is_answered_as_by_one_rank_or_refused(build_engine: BuildEngine, name: str) -> None:
    """Run with -rP to see each verdict."""
    one = build_engine(name)
    try:
        with two_ranks(build_engine, name) as engine:
            assert answers(engine) == answers(one)
    except ConfigError as exc:
        print(f"verdict: {name}: refused: {exc.message}")
    else:
        print(f"verdict: {name}: as one rank")


@pytest.mark.timeout(60, method="thread")
def test_loading_ranks_leaves_the_process_as_it_was(build_engine: BuildEngine) -> None:
    """Also where torch is asked for details, in which it has the ranks of every group wait for each other."""
    level = get_debug_level()
    set_debug_level(DebugLevel.DETAIL)
    try:
        before = dict(os.environ), sys.excepthook
        with two_ranks(build_engine):
            assert (dict(os.environ), sys.excepthook) == before
            assert get_debug_level() == DebugLevel.DETAIL
    finally:
        set_debug_level(level)


def test_both_ranks_hold_the_kv_of_one(build_engine: BuildEngine) -> None:
    [prompt] = make_prompts(3, (70,))

    def kv_of(engine: Engine) -> Tensor:
        sequence = add(engine, "x", prompt, max_tokens=3)
        while sequence.num_computed_tokens < len(prompt):
            engine.step()
        return prompt_kv(engine, sequence.blocks, len(prompt))

    with two_ranks(build_engine) as engine:
        assert len(engine.kv.shards) == 2
        torch.testing.assert_close(kv_of(engine), kv_of(build_engine()), rtol=1e-4, atol=1e-4)


def test_random_schedules_leave_nothing_behind(build_engine: BuildEngine) -> None:
    """Prompts of all lengths, aborts and a full pool at two ranks; every answer is that of the prompt alone."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    oracle = build_engine()
    with two_ranks(build_engine, num_blocks=14) as engine:
        sequences, num_waited = {}, 0
        for number in range(200):
            if rng.random() < 0.3 and len(engine.sequences) < 8:
                [prompt] = make_prompts(rng.randrange(1 << 30), (rng.randrange(1, 90),))
                sequences[str(number)] = add(engine, str(number), prompt, max_tokens=rng.randrange(1, 20))
            if engine.sequences and rng.random() < 0.05:
                request_id = rng.choice(list(engine.sequences))
                engine.abort(request_id)
                del sequences[request_id]
            engine.step()
            engine.check_integrity()
            num_waited += engine.load().num_waiting > 0
        drain(engine)
        engine.check_integrity(idle=True)
        assert num_waited > 0, "the pool was never full"
    for sequence in sequences.values():
        tokens, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
        [expected] = generate(oracle, [tokens[:num_prompt]], max_tokens=sequence.sampling.max_tokens)
        assert sequence.output_ids == expected


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_models_that_cannot_be_cut_are_refused(model_folder: Callable[[str], Path], name: str, reason: str) -> None:
    with thread_ranks(), pytest.raises(ConfigError, match=reason) as error:
        Engine(make_config(model_folder(name)))
    assert str(model_folder(name)) in error.value.message
    assert "tensor_parallel_size" in error.value.message


def test_quantized_models_are_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for file in model_folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1)
    (tmp_path / "config.json").write_text(config)
    with thread_ranks(), pytest.raises(ConfigError, match=r"quantized by 'fp8'.*tensor_parallel_size=2"):
        Engine(make_config(tmp_path))


def test_ranks_that_fail_together_stay_in_step(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(build_engine) as engine:
        expected = answers(engine)
        backend = type(engine.runner.backend)
        call = backend.__call__
        num_calls = 0

        def fail_once_on_each_rank(*arguments: Any, **options: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls <= 2:
                raise ValueError("no such attention")
            call(*arguments, **options)

        monkeypatch.setattr(backend, "__call__", fail_once_on_each_rank)
        assert answers(engine) == expected


def test_what_fails_beside_a_step_fails_the_step_on_all_ranks(build_engine: BuildEngine) -> None:
    with two_ranks(build_engine) as engine:
        sequence = add(engine, "a", make_prompts(1)[2], max_tokens=3)
        errors = iter([OSError("a broken transport")])

        def raise_once() -> None:
            if (error := next(errors, None)) is not None:
                raise error

        while engine.has_work:
            engine.step(between_layers=raise_once)
        engine.check_integrity(idle=True)
        assert sequence.output_ids == generate(engine, make_prompts(1), max_tokens=3)[2]


def test_a_rank_that_fails_alone_ends_the_engine(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks wait for it in a sum, until it leaves because nobody else says that the step failed."""
    monkeypatch.setattr("tandem.engine.tensor_parallel.follower.RESYNC_TIMEOUT_S", 0.1)
    with two_ranks(build_engine) as engine:
        monkeypatch.setattr("tandem.engine.tensor_parallel.follower._compute", lambda *_: 1 / 0)
        add(engine, "a", [5, 6, 7], max_tokens=3)
        with pytest.raises(RanksLost, match="failed: "):
            run_forever(engine)


def make_config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        pool_bytes=8 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tensor_parallel_size=2,
    )


def followers_of(engine: Engine) -> list[int]:
    assert isinstance(engine._team, Team)
    return [follower.process.pid for follower in engine._team._followers]


def test_a_killed_rank_ends_the_engine_at_once(build_engine: BuildEngine, model_folder: Callable[[str], Path]) -> None:
    shared = set(os.listdir("/dev/shm"))
    engine = Engine(make_config(model_folder("llama")))
    try:
        assert answers(engine) == answers(build_engine()), "processes answer as one process does"
        [pid] = followers_of(engine)
        add(engine, "a", make_prompts(1)[3], max_tokens=400)
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RanksLost, match=rf"rank 1 \(process {pid}\) has ended with code -9"):
            run_forever(engine)
    finally:
        engine.close()
    assert set(os.listdir("/dev/shm")) <= shared
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("is_stopped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stopped", "running"])
def test_the_ranks_end_with_rank_0(model_folder: Callable[[str], Path], is_stopped: bool) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tandem.engine.engine import Engine\n"
        "from tests.engine.test_tensor_parallel import followers_of, make_config\n"
        "engine = Engine(make_config(Path(sys.argv[1])))\n"
        "print(*followers_of(engine), flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(model_folder("llama"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as rank_0:
        assert rank_0.stdout is not None
        pid = int(rank_0.stdout.readline())
        follower = os.pidfd_open(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        rank_0.kill()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not has_ended(follower, 0.1):
            assert time.monotonic() < deadline, "a rank outlives rank 0"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(follower, signal.SIGKILL)
        os.close(follower)
