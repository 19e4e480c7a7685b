from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.interface import PagedStep, paged_attention_forward
from tests.support.attention_case import NUM_LAYERS, Case, assert_agrees

SINKS = torch.tensor([-50.0, 0.0, 3.0, 50.0])  # with no, little, much or all weight
HEADS = [(1, 1), (4, 4), (9, 3), (8, 1), (6, 2), (7, 7), (12, 1)]
CASES: list[tuple[list[int], dict[str, int], dict[str, Any]]] = [
    *(([1, 70, 33], {"head_dim": dim}, {}) for dim in (8, 16, 24, 64, 80, 128, 256, 512)),
    *(([5, 40], {"num_heads": num, "num_kv_heads": num_kv}, {}) for num, num_kv in HEADS),
    *(([1, 15, 16, 17, 63, 64, 65, 130], {"block_size": size}, {}) for size in (1, 2, 16, 64, 256)),
    *(([200, 3, 65], {}, {"window": size}) for size in (1, 2, 31, 63, 64, 65, 129, 1000)),
    *(([200, 3, 65], {}, {"window": size, "softcap": 1.5}) for size in (1, 2, 31, 63, 64, 65, 129, 1000)),
    *(([70, 1, 33], {}, {"sinks": SINKS} | more) for more in ({}, {"window": 31}, {"softcap": 1.5})),
]


@pytest.mark.parametrize(("lengths", "shape", "options"), CASES, ids=str)
def test_kernel_agrees(
    lengths: list[int], shape: dict[str, int], options: dict[str, Any], cpu_dtype: torch.dtype
) -> None:
    """For every width and grouping of heads and every block size, with windows, soft caps and sinks."""
    options = {name: value.to(cpu_dtype) if name == "sinks" else value for name, value in options.items()}
    assert_agrees(CpuAttention(2), Case(lengths, dtype=cpu_dtype, **shape), **options)


@pytest.mark.parametrize("factor", [50, 1e12])
def test_kernel_survives_large_scores(cpu_dtype: torch.dtype, factor: float) -> None:
    case = Case([80], dtype=cpu_dtype)
    case.q = [q * factor for q in case.q]
    assert_agrees(CpuAttention(2), case)


@pytest.mark.parametrize("options", [{}, {"window": 24}, {"softcap": 2.0}, {"sinks": torch.linspace(-2, 3, 9)}])
def test_results_do_not_depend_on_batch_chunks_or_threads(cpu_dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = Case([1, 17, 64, 150], num_heads=9, num_kv_heads=3, dtype=cpu_dtype)
    together_pool = case.new_pool(0.0)
    together = case.run(CpuAttention(2), together_pool, case.whole(), **options)
    for chunk_size in (1, 7, 32, 33):
        pool = case.new_pool(0.0)
        pieces: list[list[Tensor]] = [[] for _ in case.lengths]
        for start in range(0, max(case.lengths), chunk_size):
            chunks = [
                (i, start, min(start + chunk_size, length)) for i, length in enumerate(case.lengths) if start < length
            ][::-1]
            for (i, _, _), out in zip(chunks, case.run(CpuAttention(1), pool, chunks, **options), strict=True):
                pieces[i].append(out)
        for i, expected in enumerate(together):
            assert torch.equal(torch.cat(pieces[i]), expected), f"sequence {i} in chunks of {chunk_size}"
        assert torch.equal(pool, together_pool)
    for i, length in enumerate(case.lengths):
        [alone] = case.run(CpuAttention(1), case.new_pool(0.0), [(i, 0, length)], **options)
        assert torch.equal(alone, together[i])


def test_kernel_reads_strided_inputs() -> None:
    # As a fused projection hands them over: views into one tensor, heads before tokens.
    case = Case([20])
    pool = case.new_pool(0.0)
    [expected] = case.run(CpuAttention(1), pool, case.whole())
    fused = torch.cat([case.q[0], case.k[0], case.v[0]], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
    case.q, case.k, case.v = [fused[:, :4]], [fused[:, 4:6]], [fused[:, 6:]]
    [actual] = case.run(CpuAttention(1), case.new_pool(0.0), case.whole())
    assert torch.equal(actual, expected)


def test_kernel_refuses_heads_it_has_no_room_for() -> None:
    with pytest.raises(NotImplementedError, match="head_dim=520"):
        assert_agrees(CpuAttention(2), Case([3], head_dim=520))


def call_interface(
    *,
    query: tuple[int, ...] = (1, 4, 5, 16),
    key: tuple[int, ...] = (1, 2, 5, 16),
    value: tuple[int, ...] = (1, 2, 5, 16),
    layer_idx: int = 0,
    seen: list[Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Returns what the interface makes of a backend's queries. `seen` gets the backend's arguments."""
    case = Case([5])

    class Backend:
        name = "case"
        long_context = 1

        def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any, **__: Any) -> None:
            if seen is not None:
                seen.extend((q, k, v))
            out.copy_(q)

    context = StepContext(
        pool=case.new_pool(0.0),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
        kv_lens=torch.tensor([5], dtype=torch.int32),
        slot_mapping=torch.arange(5),
        max_query_len=5,
        max_kv_len=5,
    )
    module: Any = SimpleNamespace(layer_idx=layer_idx)
    tensors = (torch.ones(shape) for shape in (query, key, value))
    with PagedStep(Backend(), context, lambda: None):
        return paged_attention_forward(module, *tensors, None, **options)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": (1, 4, 5, 16), "value": (1, 4, 5, 16)},  # other number of KV heads than the pool
        {"query": (1, 4, 5, 32), "key": (1, 2, 5, 32), "value": (1, 2, 5, 32)},  # other head_dim
        {"value": (1, 2, 5, 24)},  # values wider than a slot
        {"query": (1, 4, 5, 24)},
        {"query": (1, 3, 5, 16)},  # heads that do not divide into groups
        {"query": (2, 4, 5, 16), "key": (2, 2, 5, 16), "value": (2, 2, 5, 16)},  # a batch that is not packed
        {"key": (1, 2, 9, 16), "value": (1, 2, 9, 16)},  # more keys than tokens: cross attention
        {"layer_idx": NUM_LAYERS},
    ],
)
def test_interface_refuses_kv_that_does_not_fit_the_pool(wrong: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="the KV pool has 2 layers of 2 heads of 16"):
        call_interface(**wrong)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 8), (8, 16), (8, 4)])
def test_heads_narrower_than_a_slot_are_padded_with_zeros(key_dim: int, value_dim: int) -> None:
    seen: list[Tensor] = []
    key, value = (1, 2, 5, key_dim), (1, 2, 5, value_dim)
    assert call_interface(query=(1, 4, 5, key_dim), key=key, value=value, seen=seen).shape == (1, 5, 4, value_dim)
    assert [tensor.shape[2] for tensor in seen] == [16, 16, 16]
    assert [tensor[0, 0].sum() for tensor in seen] == [key_dim, key_dim, value_dim]
