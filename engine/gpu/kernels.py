"""Triton kernels of one row between the big products: RMS norm, rotary embedding, SiLU times gate; and exact products.

In torch each takes five to ten launches: about 1,000 of the 1,470 kernels of an 8B Llama's decode step, and a fifth of
its time on an H100, without the gaps between them. Values are rounded where transformers' own code rounds them. Each
program has a row, or a part of one, to itself: no result depends on other rows.
"""

import triton
import triton.language as tl

from tandem.engine.e4m3 import e4m3_over_256


@triton.jit
def product(a, b):
    """a * b, rounded to their type; in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,  # [num_rows, IN], strided
    weight,  # [num_out, IN], contiguous
    scales,  # [num_out], float32, if HAS_SCALES
    bias,  # [num_out], if HAS_BIAS
    out,  # [num_rows, num_out], contiguous
    num_rows,
    num_out,
    x_stride,
    IN: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # of a weight in 8 bits
    IS_FP8: tl.constexpr,  # and whether its bytes are e4m3
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CAST: tl.constexpr,  # to float32 first: the interpreter's products of bfloat16 are wrong
):
    """Program (tile of rows, tile of columns) sums over IN in steps of DEPTH, from the first one on, in float32.

    Tiles are whole whatever the number of rows is, so each element is the result of the same operations in one order.
    A weight in 8 bits becomes the type of x, exactly, and the sum is scaled.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, IN, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        of_x = (rows < num_rows) & (depth[None, :] < IN)
        a = tl.load(x + rows * x_stride + depth[None, :], mask=of_x, other=0.0)
        of_weight = (columns < num_out) & (depth[:, None] < IN)
        b = tl.load(weight + columns * IN + depth[:, None], mask=of_weight, other=0.0)
        if IS_FP8:
            b = e4m3_over_256(b)
        b = b.to(tl.float32) if CAST else b.to(a.dtype)
        if CAST:
            a = a.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HAS_SCALES:
        scale = tl.load(scales + columns, mask=columns < num_out, other=0.0)
        acc *= scale * 256 if IS_FP8 else scale
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < num_out, other=0.0).to(tl.float32)
    mask = (rows < num_rows) & (columns < num_out)
    tl.store(out + rows * num_out + columns, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm(
    x,  # [T, H, DIM], strided
    added,  # [T, H, DIM], contiguous, if ADDS
    total,  # as `added`
    weight,  # [DIM]
    out,  # [T, H, DIM], contiguous
    token_stride,
    head_stride,
    epsilon,
    ADDS: tl.constexpr,  # first total = x + added, which is what is normed
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # DIM, rounded up to a power of two
):
    """Program (token, head) norms one row."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    mask = dims < DIM
    at = (token * HEADS + head) * DIM + dims
    row = tl.load(x + token * token_stride + head * head_stride + dims, mask=mask, other=0.0)
    if ADDS:
        row = (row.to(tl.float32) + tl.load(added + at, mask=mask, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + at, row, mask=mask)
    wide = row.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + epsilon)).to(row.dtype)
    scales = tl.load(weight + dims, mask=mask, other=0.0)
    tl.store(out + at, product(scales, normed).to(row.dtype), mask=mask)


@triton.jit
def silu_multiply(
    gate,  # [T, width], strided
    up,
    out,  # [T, width], contiguous
    gate_stride,
    up_stride,
    width,
    BLOCK: tl.constexpr,  # columns of one program
):
    """Program (token, part of its columns) computes silu(gate) * up, with silu rounded before the product."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(gate + token * gate_stride + columns, mask=mask, other=0.0)
    wide = row.to(tl.float32)
    power = tl.exp(-tl.abs(wide))  # never overflows
    activated = (wide * tl.where(wide < 0, power, 1.0) / (1.0 + power)).to(row.dtype)
    factors = tl.load(up + token * up_stride + columns, mask=mask, other=0.0)
    tl.store(out + token * width + columns, product(activated, factors).to(row.dtype), mask=mask)


@triton.jit
def rotate(
    query,  # [T, num_heads, 2 * HALF], strided
    key,  # [T, num_kv_heads, 2 * HALF], strided
    cos,  # [T, 2 * HALF], contiguous
    sin,
    out,  # [T, num_heads + num_kv_heads, 2 * HALF], contiguous
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    num_heads,
    num_all,  # heads and key/value heads
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # HALF, rounded up to a power of two
    HEADS: tl.constexpr,  # of one program: a power of two
):
    """Program (token, group of heads): head * cos + rotate_half(head) * sin, products rounded before the sum."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    mask = (heads < num_all) & (dims < HALF)
    of_query = query + token * query_token_stride + heads * query_head_stride
    of_key = key + token * key_token_stride + (heads - num_heads) * key_head_stride
    row = tl.where(heads < num_heads, of_query, of_key) + dims
    left, right = tl.load(row, mask=mask), tl.load(row + HALF, mask=mask)
    table = token * 2 * HALF + dims
    is_table = dims < HALF
    left_cos, right_cos = tl.load(cos + table, mask=is_table), tl.load(cos + table + HALF, mask=is_table)
    left_sin, right_sin = tl.load(sin + table, mask=is_table), tl.load(sin + table + HALF, mask=is_table)
    to = out + (token * num_all + heads) * 2 * HALF + dims
    tl.store(to, (product(left, left_cos) - product(right, left_sin)).to(left.dtype), mask=mask)
    tl.store(to + HALF, (product(right, right_cos) + product(left, right_sin)).to(left.dtype), mask=mask)
