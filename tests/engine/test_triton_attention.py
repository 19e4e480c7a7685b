"""The Triton kernels, on a GPU or under Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.attention.triton import TritonAttention, split_tokens, tile_of
from tandem.engine.quantization import as_kv
from tests.engine.test_engine import generate, make_prompt
from tests.support.attention_case import Case, assert_agrees

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]  # the compiler takes a minute on a busy machine

pytest.importorskip("triton", reason="Triton is for Linux")

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
BACKEND = TritonAttention(64)  # a short split, so that few keys make many
NAN = float("nan")
# The GPUs that each is compiled for: two models and one whose KV is in fp8. Merging sees no KV.
KERNELS = dict.fromkeys(("write_kv", "attend", "attend_decoding"), (80, 80, 80, 90, 90, 90))
KERNELS["merge_splits"] = (80, 80, 90, 90, 90)
SINKS = torch.tensor([-50.0, 0.0, 3.0, 50.0], device=DEVICE)  # with no, little, much or all weight
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
every_kv_dtype = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["", "fp8"])


def make_case(lengths: list[int], **settings: Any) -> Case:
    return Case(lengths, device=DEVICE, **settings)


HEADS = [(1, 1), (4, 4), (9, 3), (6, 2), (70, 1)]
CASES: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
    *(([1, 21, 9], {"head_dim": dim, "dtype": dtype}, {}) for dim in (8, 80, 128, 256) for dtype in DTYPES),
    *(([3, 11], {"num_heads": num, "num_kv_heads": num_kv}, {}) for num, num_kv in HEADS),
    *(([1, 15, 33], {"block_size": size}, {}) for size in (1, 2, 64, 256)),
    *(([90, 1, 3], {}, {"window": size}) for size in (1, 65, 1000)),
    *(([90, 1, 3], {}, {"window": size, "softcap": 1.5}) for size in (0, 31)),
    *(([90, 1, 3], {}, {"window": size, "sinks": SINKS}) for size in (0, 1, 31)),
    ([90, 1, 3], {}, {"window": 31, "softcap": 1.5, "sinks": SINKS}),
    *(([1, 21, 9], {"head_dim": dim, "dtype": dtype, "kv_dtype": FP8}, {}) for dim in (8, 80, 256) for dtype in DTYPES),
    *(([3, 11], {"num_heads": num, "num_kv_heads": num_kv, "kv_dtype": FP8}, {}) for num, num_kv in HEADS[2:]),
    *(([1, 15, 33], {"block_size": size, "kv_dtype": FP8}, {}) for size in (1, 256)),
    *(([90, 1, 3], {"kv_dtype": FP8}, {"window": size, "sinks": SINKS}) for size in (0, 1, 65)),
    ([90, 1, 3], {"kv_dtype": FP8, "dtype": torch.bfloat16}, {"window": 31, "softcap": 1.5, "sinks": SINKS}),
]


@pytest.mark.parametrize(("lengths", "shape", "options"), CASES, ids=str)
def test_kernel_agrees(lengths: list[int], shape: dict[str, Any], options: dict[str, Any]) -> None:
    """For every width and grouping of heads and every block size, with windows, soft caps and sinks."""
    assert_agrees(BACKEND, make_case(lengths, **shape), **options)


def nearest_codes(x: Tensor) -> Tensor:
    """The codes of e4m3, as uint8, nearest to float32 numbers [n]; in the middle between two the even one."""
    sizes = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    middles = (sizes[:-1] + sizes[1:]) / 2
    size = x.double().abs()
    code = torch.searchsorted(middles, size.nan_to_num(0.0), right=False)
    code += (size == middles[code.clamp_max(125)]) & (code % 2 == 1)
    code = torch.where(x.isnan(), 127, code)
    return (code + 128 * x.signbit()).to(torch.uint8)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy computes what is interpreted, and some NaNs are signalling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_rounded_to_the_nearest_of_fp8(dtype: torch.dtype) -> None:
    """All numbers of bfloat16, and of float32 those beside the middle between two of fp8, and some of all sizes."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = bits.to(torch.int16).view(torch.bfloat16)
    if dtype is torch.float32:
        sizes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        middles = ((sizes[:-1] + sizes[1:]) / 2).view(torch.int32)
        x = torch.cat([bits * 65521, *(middles + step for step in (-1, 0, 1))])[-(1 << 16) :].view(torch.float32)
    x[:4] = torch.tensor([float("inf"), -float("inf"), 1e30, NAN])
    assert x.dtype is dtype
    key = x.view(8, 32, 256).to(DEVICE)
    pool = torch.zeros(1, 1, 2, 8, 32, 256, device=DEVICE).to(FP8)
    BACKEND._write(*pool.view(torch.int8)[0, :, :].unbind(1), key, -key, torch.arange(8, device=DEVICE))
    for side, numbers in enumerate((x, -x)):
        written = pool[0, 0, side].view(torch.uint8).flatten().cpu()
        assert torch.equal(written, nearest_codes(numbers.float()))
        in_torch = as_kv(numbers, FP8).float().nan_to_num(7.0)  # a NaN may have lost its sign
        assert torch.equal(written.view(FP8).float().nan_to_num(7.0), in_torch)
    assert pool[0, 0, 0, 0, 0, :3].tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers_of_fp8_are_widened_exactly_and_nan_stays(dtype: torch.dtype) -> None:
    """The output of a token that sees only itself is its value."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    case = make_case([1], num_heads=2, num_kv_heads=1, head_dim=256, dtype=dtype, kv_dtype=FP8)
    case.v = [codes.to(dtype).view(1, 1, 256)]
    [out] = case.run(BACKEND, case.new_pool(NAN), case.whole())
    assert int(out[0, 0].isnan().sum()) == 2
    assert torch.equal(out[0].float().nan_to_num(7.0), codes.float().nan_to_num(7.0).expand(2, 256))


def test_a_key_that_is_nan_is_seen_in_its_tokens_only() -> None:
    case = make_case([20, 5], kv_dtype=FP8)
    case.k[0][11] = NAN
    outs = case.run(BACKEND, case.new_pool(NAN), case.whole())
    assert outs[0][11:].isnan().all()
    assert not torch.cat([outs[0][:11], outs[1]]).isnan().any()


def test_keys_of_all_sizes_of_fp8_are_multiplied_exactly() -> None:
    case = make_case([60], kv_dtype=FP8)
    case.q = [q * 0.01 for q in case.q]
    case.k = [k * torch.logspace(-9, 9, 16, base=2.0, device=DEVICE) for k in case.k]
    assert_agrees(BACKEND, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_survives_large_scores(dtype: torch.dtype) -> None:
    case = make_case([40], dtype=dtype)
    case.q = [q * 200 for q in case.q]
    assert_agrees(BACKEND, case)
    assert_agrees(BACKEND, case, softcap=1.5)


@pytest.mark.parametrize(
    "options", [{}, {"window": 70}, {"softcap": 1.5, "sinks": SINKS}, {"window": 30, "sinks": SINKS}]
)
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 199, 200), (1, 63, 64), (2, 64, 65), (3, 0, 1)],  # decoding alone: a program for each split
        [(0, 191, 200), (1, 60, 64), (2, 57, 65), (3, 0, 1)],  # several tokens each, as for speculation
        [(0, 150, 200), (1, 63, 64), (2, 64, 65), (3, 0, 1)],  # decoding beside a chunk of a prompt
    ],
)
@every_kv_dtype
def test_splits_of_long_contexts_agree(
    kv_dtype: torch.dtype | None, chunks: list[tuple[int, int, int]], options: dict[str, Any]
) -> None:
    case = make_case([200, 64, 65, 1], kv_dtype=kv_dtype)
    pool = case.new_pool(NAN)
    case.run(ReferenceAttention(), pool, case.whole())
    expected = case.run(ReferenceAttention(), pool.clone(), chunks, **options)
    lse = torch.full((sum(end - start for _, start, end in chunks), 4), NAN, device=DEVICE)
    expected_lse = torch.empty_like(lse)
    case.run(ReferenceAttention(), pool.clone(), chunks, lse=expected_lse, **options)
    actual = case.run(BACKEND, pool, chunks, lse=lse, **options)
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)


@pytest.fixture
def row_independent_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply row by row. numpy's BLAS sums a row in another order elsewhere in the tile; tensor cores do not."""
    if not IS_INTERPRETED:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> Any:
        return TensorHandle(np.einsum("ik,kj->ij", a.data, b.data).astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "options"),
    [
        (torch.float32, None, {}),
        (torch.float32, None, {"window": 70, "sinks": torch.linspace(-2, 3, 3, device=DEVICE)}),
        (torch.bfloat16, None, {"softcap": 2.0}),
        (torch.bfloat16, FP8, {}),
    ],
)
@pytest.mark.usefixtures("row_independent_dot")
def test_results_do_not_depend_on_batch_or_chunks(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, options: dict[str, Any], seed: int
) -> None:
    """Each sequence whole and alone equals itself in any chunks beside any others, bit for bit."""
    print(f"{seed=}")
    generator = random.Random(seed)
    case = make_case([1, 66, 170], num_heads=3, num_kv_heads=1, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
    pool, alone_pool = case.new_pool(NAN), case.new_pool(NAN)
    pieces: list[list[Tensor]] = [[] for _ in case.lengths]
    done = [0, 0, 0]
    while done != case.lengths:
        chunks = []
        for i in generator.sample(range(3), 3):
            size = min(generator.choice([1, 1, 9, 21, 64, 100]), case.lengths[i] - done[i])
            if size and generator.random() < 0.8:
                chunks.append((i, done[i], done[i] + size))
                done[i] += size
        if chunks:
            for (i, _, _), out in zip(chunks, case.run(BACKEND, pool, chunks, **options), strict=True):
                pieces[i].append(out)
    for i, length in enumerate(case.lengths):
        [alone] = case.run(BACKEND, alone_pool, [(i, 0, length)], **options)
        assert torch.equal(torch.cat(pieces[i]), alone), f"sequence {i} in chunks of {[len(x) for x in pieces[i]]}"
    assert torch.equal(pool.view(torch.uint8), alone_pool.view(torch.uint8))


@pytest.mark.parametrize("num_heads", [4, 70])  # in one tile of heads, in several
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"window": 70}, marks=pytest.mark.slow),
        {"softcap": 1.5, "window": 200},
    ],
)
def test_bounds_of_a_captured_step_change_no_bit(num_heads: int, options: dict[str, Any]) -> None:
    """Contexts within one split and over many, of more sequences than programs share them."""
    case = make_case([200, 64, 65, 1, 130, 129, 300], num_heads=num_heads, num_kv_heads=1)
    pool = case.new_pool(NAN)
    case.run(ReferenceAttention(), pool, case.whole())
    chunks = [(i, length - 1, length) for i, length in enumerate(case.lengths)]
    expected = case.run(ReferenceAttention(), pool.clone(), chunks, **options)
    exact = case.run(BACKEND, pool.clone(), chunks, **options)
    bounded = case.run(BACKEND, pool.clone(), chunks, max_kv_len=4000, **options)
    torch.testing.assert_close(torch.cat(exact), torch.cat(expected), atol=2e-5, rtol=2e-5)
    assert torch.equal(torch.cat(bounded), torch.cat(exact))


def test_kernel_reads_strided_inputs() -> None:
    case = make_case([20])
    [expected] = case.run(BACKEND, case.new_pool(NAN), case.whole())
    fused = torch.cat([case.q[0], case.k[0], case.v[0]], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
    case.q, case.k, case.v = [fused[:, :4]], [fused[:, 4:6]], [fused[:, 6:]]
    [actual] = case.run(BACKEND, case.new_pool(NAN), case.whole())
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_row_without_keys_is_zero() -> None:
    """As a row that only fills a captured batch; bounds above the largest lengths change nothing."""
    case = make_case([3])
    context = StepContext(
        pool=case.new_pool(NAN),
        block_tables=torch.zeros(2, 1, dtype=torch.int32, device=DEVICE),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
        kv_lens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.tensor([1, 0], device=DEVICE),
        max_query_len=4,
        max_kv_len=200,
    )
    out = torch.full((2, 4, 16), NAN, device=DEVICE)
    query, key, value = case.q[0][:2], case.k[0][:2], case.v[0][:2]
    BACKEND(0, query, key, value, out, context, scale=1.0, window=0, softcap=0.0, sinks=None)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1], value[1].repeat_interleave(2, dim=0))


def test_kernel_refuses_heads_it_has_no_room_for() -> None:
    with pytest.raises(NotImplementedError, match="head_dim=272"):
        assert_agrees(BACKEND, make_case([3], head_dim=272))


@pytest.mark.parametrize(
    ("max_model_len", "expected"), [(1, 512), (32768, 512), (32769, 1024), (131072, 2048), (1 << 20, 16384)]
)
def test_a_model_has_at_most_64_splits_of_its_context(max_model_len: int, expected: int) -> None:
    split = split_tokens(max_model_len)
    assert split == expected
    assert -(-max_model_len // split) <= 64
    assert all(split % tile_of(dim, dtype).keys == 0 for dim in (64, 128, 256) for dtype in (torch.float32, torch.half))


@pytest.mark.skipif(not IS_INTERPRETED, reason="builds an engine on the CPU")
@pytest.mark.parametrize(
    "name", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)  # soft caps; sinks; both with windows in every other layer
def test_an_engine_on_triton_gives_the_tokens_of_the_cpu_kernel(name: str, build_engine: Callable[..., Any]) -> None:
    prompts = [make_prompt(length) for length in (3, 30)]
    expected = generate(build_engine(name), prompts, max_tokens=3)
    assert generate(build_engine(name, attention_backend="triton"), prompts, max_tokens=3) == expected


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler makes of the kernels for Ampere and Hopper, for two models each, and one with KV in fp8."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_kernels_compile_for_gpus(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["cubin"] > 0
        assert kernel["shared"] <= 99 << 10, kernel  # what one program may use on GPUs of 100 KB


def test_steps_of_another_size_need_no_other_kernel(compiled: list[dict[str, Any]]) -> None:
    """A kernel that is compiled while requests wait delays them by seconds."""
    names = [(kernel["kernel"], kernel["capability"]) for kernel in compiled]
    attention = [(name, gpu) for name, gpus in KERNELS.items() for gpu in gpus]
    norms = [("rms_norm", gpu) for gpu in (80, 80, 90, 90)]  # of rows, and of heads
    others = [(name, gpu) for name in ("silu_multiply", "rotate") for gpu in (80, 90)]
    tiles, weights = 3, 3  # few columns, more of them, and wide tiles; of weights as loaded, int8 and fp8
    products = [("multiply", gpu) for gpu in (80, 90) for _ in range(tiles * weights)]
    assert names == attention + norms + others + products


def test_compiled_products_use_tensor_cores_and_load_ahead(compiled: list[dict[str, Any]]) -> None:
    for kernel in (one for one in compiled if one["kernel"] == "multiply"):
        assert kernel["wgmma" if kernel["capability"] == 90 else "mma"], kernel
        assert kernel["copies ahead"], kernel


@pytest.mark.parametrize("name", ["attend", "attend_decoding"])
def test_compiled_attention_uses_tensor_cores_and_loads_ahead(name: str, compiled: list[dict[str, Any]]) -> None:
    bfloat16, float32, fp8, *hopper = [kernel for kernel in compiled if kernel["kernel"] == name]
    assert all(kernel["mma"] and kernel["copies ahead"] for kernel in (bfloat16, fp8))
    assert float32["mma"] == 0  # tensor cores would round it
    assert all(kernel["wgmma"] and kernel["copies ahead"] for kernel in hopper)
