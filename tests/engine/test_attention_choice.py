from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from tandem.engine.attention import fa3
from tandem.engine.attention.choice import Device, choose_backend
from tandem.engine.attention.fa3 import Fa3Attention
from tandem.engine.attention.interface import LayerAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.protocol.errors import ConfigError
from tests.support.attention_case import Case

FP8 = torch.float8_e4m3fn
PLAIN = LayerAttention(num_heads=8, scale=0.1, window=0, softcap=0.0, has_sinks=False)
CPU = Device(kind="cpu", has_triton=True)
AMPERE = Device(kind="cuda", capability=(8, 0), has_triton=True, has_fa3=True)
HOPPER = Device(kind="cuda", capability=(9, 0), has_triton=True, has_fa3=True)
BLACKWELL = Device(kind="cuda", capability=(10, 0), has_triton=True, has_fa3=True)
HOPPER_WITHOUT_FA3 = Device(kind="cuda", capability=(9, 0), has_triton=True)


def choose(
    wanted: str,
    device: Device,
    *layers: LayerAttention,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> str:
    return choose_backend(wanted, device, head_dim, dtype, layers or (PLAIN,), kv_dtype)


@pytest.mark.parametrize(
    ("wanted", "device", "layer", "fields", "expected"),
    [
        ("auto", CPU, PLAIN, {}, "cpu"),
        *(("auto", device, PLAIN, {}, "triton") for device in (AMPERE, HOPPER_WITHOUT_FA3, BLACKWELL)),
        ("auto", HOPPER, PLAIN, {}, "fa3"),
        ("auto", HOPPER, PLAIN._replace(window=128), {}, "fa3"),
        ("auto", HOPPER, PLAIN._replace(softcap=50.0), {}, "triton"),
        ("auto", HOPPER, PLAIN._replace(has_sinks=True), {}, "triton"),
        *(("auto", HOPPER, PLAIN, one, "triton") for one in ({"head_dim": 288}, {"dtype": torch.float32})),
        *((forced, HOPPER, PLAIN, {}, forced) for forced in ("triton", "fa3")),
        *(("auto", device, PLAIN, {"kv_dtype": FP8}, "triton") for device in (AMPERE, HOPPER)),
        ("auto", HOPPER, PLAIN, {"kv_dtype": torch.bfloat16}, "fa3"),
        ("triton", Device(kind="cpu", has_triton=True, is_interpreting=True), PLAIN, {}, "triton"),
    ],
)
def test_each_device_and_model_has_its_backend(
    wanted: str, device: Device, layer: LayerAttention, fields: dict[str, Any], expected: str
) -> None:
    assert choose(wanted, device, PLAIN, layer, **fields) == expected


@pytest.mark.parametrize(
    ("wanted", "device", "layer", "message"),
    [
        ("cpu", HOPPER, PLAIN, "attention_backend=cpu cannot be used: it runs on CPUs only; choose auto"),
        ("fa3", CPU, PLAIN, "needs a Hopper GPU"),
        ("fa3", AMPERE, PLAIN, "needs a Hopper GPU"),
        ("fa3", HOPPER_WITHOUT_FA3, PLAIN, "flash_attn_interface. is not installed"),
        ("fa3", HOPPER, PLAIN._replace(softcap=30.0), "soft cap"),
        ("fa3", HOPPER, PLAIN._replace(has_sinks=True), "attention sinks"),
        ("triton", CPU, PLAIN, "need a GPU"),
        ("triton", Device(kind="cuda", capability=(8, 0)), PLAIN, "pip install triton"),
        ("auto", Device(kind="cuda", capability=(8, 0)), PLAIN, "no attention backend runs on this cuda device"),
        ("auto", Device(kind="cuda", capability=(7, 5), has_triton=True), PLAIN, "8.0, and this GPU has 7.5"),
    ],
)
def test_what_cannot_run_is_refused(wanted: str, device: Device, layer: LayerAttention, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(wanted, device, layer)


@pytest.mark.parametrize(("wanted", "device"), [("fa3", HOPPER), ("cpu", CPU)])
def test_kv_in_fp8_is_for_triton(wanted: str, device: Device) -> None:
    with pytest.raises(
        ConfigError, match=f"{wanted} cannot be used: it reads no KV in torch.float8_e4m3fn; choose auto"
    ):
        choose(wanted, device, kv_dtype=FP8)


@pytest.fixture
def fa3_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts plain attention in the place of torch's function, and returns the arguments that it was called with."""
    calls: list[dict[str, Any]] = []

    def record(*args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(varlen_attn_out).bind(*args, **kwargs)  # raises for arguments it has not
        calls.append(arguments.arguments)

    monkeypatch.setattr(fa3, "varlen_attn_out", record)
    monkeypatch.setattr(fa3, "activate_flash_attention_impl", lambda name: calls.append({"activated": name}))
    return calls


def test_fa3_is_called_with_the_arguments_that_torch_documents(fa3_calls: list[dict[str, Any]]) -> None:
    case = Case([5, 20], num_heads=4, num_kv_heads=2)
    pool, expected_pool = case.new_pool(0.0), case.new_pool(0.0)
    chunks = [(0, 0, 5), (1, 0, 20)]
    backend = Fa3Attention()
    case.run(backend, pool, chunks, window=7)
    case.run(ReferenceAttention(), expected_pool, chunks)
    assert torch.equal(pool, expected_pool)
    activated, call = fa3_calls
    assert activated == {"activated": "FA3"}
    assert call["window_size"] == (6, 0)  # a token sees six before itself
    assert call["key"].shape == call["value"].shape == (pool.shape[0], 16, 2, 16)
    assert (call["key"].data_ptr(), call["value"].data_ptr()) == (pool[0, 1, 0].data_ptr(), pool[0, 1, 1].data_ptr())
    assert call["seqused_k"].tolist() == [5, 20]
    assert (call["max_q"], call["max_k"], call["enable_gqa"], call["scale"]) == (20, 20, True, 0.3)
    assert call["cu_seq_q"].tolist() == [0, 5, 25]
    assert call["cu_seq_k"] is None
    case.run(backend, pool, chunks)
    assert fa3_calls[-1]["window_size"] == (-1, 0)  # what torch takes for causal


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.zeros(4)}])
def test_fa3_refuses_what_it_would_leave_out(options: dict[str, Any], fa3_calls: list[dict[str, Any]]) -> None:
    case = Case([5])
    with pytest.raises(NotImplementedError, match="FlashAttention 3"):
        case.run(Fa3Attention(), case.new_pool(0.0), case.whole(), **options)


class Faulty:
    """Plain attention with a fault."""

    name = "faulty"
    long_context = 300

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.num_calls = 0

    def __call__(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, context: Any, **options: Any
    ) -> None:
        self.num_calls += 1
        removed = {"no window": {"window": 0}, "no soft cap": {"softcap": 0.0}, "no sinks": {"sinks": None}}
        if self.fault == "raises":
            raise NotImplementedError("heads of 16 are too few")
        whole = torch.empty_like(out)
        options |= removed.get(self.fault, {})
        ReferenceAttention()(layer_idx, query, key, value, whole, context, **options)
        if self.fault == "first sequence only" and context.max_query_len == 1:
            out[0] = whole[0]
            return
        out.copy_(whole)
        if self.fault == "reads free slots":
            out[-1] += 0.0 * context.pool[:, layer_idx, 1].sum().to(out.dtype)
        if self.fault == "writes elsewhere":
            context.pool[int(context.block_tables[0, 0]), layer_idx - 1] = 1.0
        if self.fault == "long contexts" and context.max_kv_len >= self.long_context:
            out[-1] *= 1.5


def check(
    fault: str, layer: LayerAttention, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> Faulty:
    """Run the check at start on a backend with this fault; returns the backend."""
    from tandem.engine.attention_check import check_attention

    model: Any = SimpleNamespace(
        module=None,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=torch.device("cpu"),
        attentions=frozenset({PLAIN._replace(num_heads=4), layer}),
    )
    faulty = Faulty(fault)
    check_attention(model, faulty, block_size=16)
    return faulty


FAULTS = ["first sequence only", "no window", "no soft cap", "no sinks", "reads free slots", "writes elsewhere"]
FAULTS += ["long contexts", "raises"]
FULL = LayerAttention(num_heads=4, scale=0.25, window=4096, softcap=30.0, has_sinks=True)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_backend_passes_the_check(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    assert check("none", FULL, dtype, kv_dtype).num_calls == 6, "two layers, each in three steps"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_is_refused_by_name(fault: str) -> None:
    message = r"attention_backend=faulty differs from plain attention by .* choose another"
    if fault == "raises":
        message = "cannot be served with attention_backend=faulty: heads of 16 are too few"
    with pytest.raises(ConfigError, match=message):
        check(fault, FULL)
