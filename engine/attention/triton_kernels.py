"""Triton kernels of paged attention: write new KV, attend, merge partial results.

Imported only where Triton is installed. `triton.py` beside it launches them and names their shapes.

One rule shapes the arithmetic: the result of a query row depends, bit for bit, only on that row and the keys before it.
Keys are visited in tiles of KEYS, and tiles are summed in splits of SPLIT keys, both counted from position 0. A split
starts from nothing, and splits are merged in order by `merge`. So it makes no difference whether one program walks
through all splits of a row, as for long chunks of prompts, or many programs compute some each, as for decoding.
Keys that a row does not see add exact zeros. There is one tile shape for all rows, because tensor cores may sum in
another order for another shape.

A pool of int8 holds the bytes of float8_e4m3fn. KV is rounded where it is written. Where it is read it becomes the type
of the query, divided by 256 and exact; the scores and the sums of a split are multiplied by 256.
"""

import triton
import triton.language as tl

from tandem.engine.e4m3 import e4m3_or_nan_over_256, to_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def write_kv(
    layer_keys,  # this layer's keys of block 0: [BLOCK_SIZE, num_kv_heads, HEAD_DIM], strided
    layer_values,
    block_stride,  # of the pool, in elements
    slot_stride,
    kv_head_stride,
    key,  # [T, num_kv_heads, HEAD_DIM], strided
    value,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_mapping,  # [T]
    num_kv_heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program: a power of two
    DIM: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
):
    """Program (token, group of heads) writes the token's KV into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    heads, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    mask = (heads < num_kv_heads) & (dims < HEAD_DIM)
    to = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + heads * kv_head_stride + dims
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    values = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    if layer_keys.dtype.element_ty == tl.int8:
        keys, values = to_e4m3(keys), to_e4m3(values)
    tl.store(layer_keys + to, keys, mask=mask)
    tl.store(layer_values + to, values, mask=mask)


@triton.jit
def merge(acc, top, total, part_acc, part_top, part_total):
    """Add a split to the splits before it: sums of weighted values [R, DIM], largest scores [R], sums of weights [R].

    Adding to nothing (0, -inf, 0) gives exactly the split; adding nothing changes no bit. The multiply-adds are
    explicit, so that no compiler fuses them in one kernel and not in the other.
    """
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == MINUS_INFINITY, 0.0, new_top)
    old_weight, part_weight = tl.exp2(top - base), tl.exp2(part_top - base)
    acc = tl.fma(acc, tl.broadcast_to(old_weight[:, None], acc.shape), part_acc * part_weight[:, None])
    total = tl.fma(total, old_weight, part_total * part_weight)
    return acc, new_top, total


@triton.jit
def load_rows(starts, is_row, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Rows [R, DIM] of HEAD_DIM elements from these addresses [R], with zeros beyond and in the place of no row."""
    dims = tl.arange(0, DIM)[None, :]
    return tl.load(starts[:, None] + dims, mask=is_row[:, None] & (dims < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(starts, rows, is_row, HEAD_DIM: tl.constexpr):
    """Store the first HEAD_DIM elements of rows [R, DIM] at these addresses [R]."""
    dims = tl.arange(0, rows.shape[1])[None, :]
    tl.store(starts[:, None] + dims, rows, mask=is_row[:, None] & (dims < HEAD_DIM))


@triton.jit
def store_parts(part_acc, part_stats, parts, acc, top, total, is_row, HEAD_DIM: tl.constexpr):
    """Store the result of a split for `merge_splits`; `parts` [R] are the places of its rows."""
    store_rows(part_acc + parts * HEAD_DIM, acc, is_row, HEAD_DIM)
    tl.store(part_stats + parts * 2, top, mask=is_row)
    tl.store(part_stats + parts * 2 + 1, total, mask=is_row)


@triton.jit
def find_sequence(query_starts, num_seqs, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence of a tile. Tiles from `query_starts[i] * GROUP // ROWS + i` on are those of sequence i."""
    low, high = tl.full((), 0, tl.int32), num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) * GROUP // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_split(
    query,  # [ROWS, DIM]
    positions,  # [ROWS]
    kv,  # where the sequence's KV of one head is: (keys, values, table row, KV head, strides: block, slot, KV head)
    split,
    oldest_key,  # that any row sees
    newest_key,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    CAST: tl.constexpr,  # whether to multiply in float32
):
    """Attention over the keys of one split: (sums of weighted values, largest scores in log2, sums of weights)."""
    layer_keys, layer_values, table, kv_head, block_stride, slot_stride, kv_head_stride = kv
    acc = tl.zeros(query.shape, tl.float32)
    top = tl.full([query.shape[0]], MINUS_INFINITY, tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    dims = tl.arange(0, query.shape[1])
    has_dim = dims < HEAD_DIM
    IS_FP8: tl.constexpr = layer_keys.dtype.element_ty == tl.int8
    scale = scale * LOG2_E
    if IS_FP8:
        scale *= 256.0
    first_key = tl.maximum(split * SPLIT, oldest_key // KEYS * KEYS)
    end_key = tl.minimum((split + 1) * SPLIT, newest_key + 1)
    for start in range(first_key, end_key, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end_key  # slots beyond hold anything, even NaN, and 0 * NaN is not 0
        block = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = block * block_stride + (keys % BLOCK_SIZE) * slot_stride + kv_head * kv_head_stride
        k = tl.load(layer_keys + offset[None, :] + dims[:, None], mask=is_key[None, :] & has_dim[:, None], other=0.0)
        v = tl.load(layer_values + offset[:, None] + dims[None, :], mask=is_key[:, None] & has_dim[None, :], other=0.0)
        if IS_FP8:
            k, v = e4m3_or_nan_over_256(k).to(query.dtype), e4m3_or_nan_over_256(v).to(query.dtype)
        if CAST:
            scores = tl.dot(query.to(tl.float32), k.to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(query, k, input_precision="ieee")
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 long before the power overflows
            power = tl.exp2(tl.minimum(scores * (scale * 2.0 / SOFTCAP), 64.0))
            scores = (1.0 - 2.0 / (power + 1.0)) * (SOFTCAP * LOG2_E)
        else:
            scores = scores * scale
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, MINUS_INFINITY)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(top - base)
        total = total * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        weights = weights.to(v.dtype)
        if CAST:
            acc = acc + tl.dot(weights.to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(weights, v, acc, input_precision="ieee")
        top = new_top
    if IS_FP8:
        acc *= 256.0
    return acc, top, total


@triton.jit
def finish(acc, top, total):
    """(outputs [R, DIM], log-sum-exp [R]); zeros and -inf for rows that saw nothing."""
    total = tl.where(total > 0.0, total, 1.0)
    inverse = 1.0 / total
    return acc * inverse[:, None], (top + tl.log2(total)) / LOG2_E


@triton.jit
def begin_sums(sinks, heads, is_row, is_parallel, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(largest scores in log2 [ROWS], sums of weights [ROWS]) of rows that have seen nothing but their sinks."""
    top = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # a sink is one more score that every row sees, of a key whose value is zero
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(is_parallel, top, sink)  # `merge_splits` adds it
        total = tl.where(is_parallel, total, 1.0)
    return top, total


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "parallel_tokens"])
def attend(
    out,  # [T, num_heads, HEAD_DIM]
    lse,  # [T, num_heads], float32
    part_acc,  # [num_seqs * parallel_tokens, num_heads, splits, HEAD_DIM], float32
    part_stats,  # [num_seqs * parallel_tokens, num_heads, splits, 2]: largest score, sum of weights
    query,  # [T, num_heads, HEAD_DIM], strided
    query_token_stride,
    query_head_stride,
    layer_keys,
    layer_values,
    block_stride,
    slot_stride,
    kv_head_stride,
    sinks,  # [num_heads]
    block_tables,  # [num_seqs, table_stride]
    table_stride,
    query_starts,
    kv_lens,
    num_seqs,
    parallel_tokens,  # sequences with at most this many tokens are computed by one program for each split
    scale,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,  # query heads for each KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program (tile, KV head, split) computes ROWS rows of a sequence; row r is token r // GROUP, head r % GROUP."""
    tile, kv_head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = find_sequence(query_starts, num_seqs, tile, GROUP, ROWS)
    query_start = tl.load(query_starts + seq)
    num_tokens = tl.load(query_starts + seq + 1) - query_start
    first_row = (tile - query_start * GROUP // ROWS - seq) * ROWS
    first_position = tl.load(kv_lens + seq) - num_tokens  # of the sequence's first token in this step
    newest = first_position + (tl.minimum(first_row + ROWS, num_tokens * GROUP) - 1) // GROUP
    oldest_key = 0
    if WINDOW > 0:
        oldest_key = tl.maximum(first_position + first_row // GROUP - WINDOW + 1, 0)
    first_split, end_split = oldest_key // SPLIT, newest // SPLIT + 1
    is_parallel = num_tokens <= parallel_tokens
    has_work = tl.where(is_parallel, (lane >= first_split) & (lane < end_split), lane == 0)
    if (first_row >= num_tokens * GROUP) | (has_work == 0):
        return
    first_split, end_split = tl.where(is_parallel, lane, first_split), tl.where(is_parallel, lane + 1, end_split)

    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < num_tokens * GROUP
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = first_position + tokens
    top, total = begin_sums(sinks, heads, is_row, is_parallel, ROWS, HAS_SINKS)

    at = (query_start + tokens).to(tl.int64)
    q = load_rows(query + at * query_token_stride + heads * query_head_stride, is_row, HEAD_DIM, DIM)
    table = block_tables + seq.to(tl.int64) * table_stride
    kv = (layer_keys, layer_values, table, kv_head, block_stride, slot_stride, kv_head_stride)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for split in range(first_split, end_split):
        split_acc, split_top, split_total = attend_split(
            q, positions, kv, split, oldest_key, newest, scale, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, SPLIT, KEYS, CAST
        )
        acc, top, total = merge(acc, top, total, split_acc, split_top, split_total)

    num_heads = num_kv_heads * GROUP
    if is_parallel:
        parts = ((seq * parallel_tokens + tokens).to(tl.int64) * num_heads + heads) * tl.num_programs(2) + lane
        store_parts(part_acc, part_stats, parts, acc, top, total, is_row, HEAD_DIM)
    else:
        result, row_lse = finish(acc, top, total)
        to = at * num_heads + heads
        store_rows(out + to * HEAD_DIM, result, is_row, HEAD_DIM)
        if HAS_LSE:
            tl.store(lse + to, row_lse, mask=is_row)


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "num_splits"])
def attend_decoding(
    part_acc,  # [num_seqs, num_heads, num_splits, HEAD_DIM], float32
    part_stats,  # [num_seqs, num_heads, num_splits, 2]
    query,  # [num_seqs, num_heads, HEAD_DIM], strided
    query_token_stride,
    query_head_stride,
    layer_keys,
    layer_values,
    block_stride,
    slot_stride,
    kv_head_stride,
    block_tables,  # [num_seqs, table_stride]
    table_stride,
    kv_lens,
    num_seqs,  # at most SEQS
    num_splits,
    scale,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program (p, KV head, tile of heads) computes splits p, p + P, ... of sequences that compute one token each.

    The splits of all sequences are counted on the device. So a fixed number P of programs shares the work evenly,
    however long the contexts are, and none is launched for contexts that could be longer.
    """
    kv_head = tl.program_id(1)
    seqs = tl.arange(0, SEQS)
    lens = tl.load(kv_lens + seqs, mask=seqs < num_seqs, other=0)
    counts = tl.where(seqs < num_seqs, tl.maximum(lens - 1, 0) // SPLIT + 1, 0)
    if WINDOW > 0:
        counts -= tl.maximum(lens - WINDOW, 0) // SPLIT
    ends = tl.cumsum(counts, 0)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    for item in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        seq = tl.sum((ends <= item).to(tl.int32), 0)
        kv_len = tl.load(kv_lens + seq)
        oldest_key = 0
        if WINDOW > 0:
            oldest_key = tl.maximum(kv_len - WINDOW, 0)
        first_item = tl.max(tl.where(ends <= item, ends, 0), 0)
        split = oldest_key // SPLIT + item - first_item
        at = seq.to(tl.int64)
        q = load_rows(query + at * query_token_stride + heads * query_head_stride, is_row, HEAD_DIM, DIM)
        newest = kv_len - 1
        positions = tl.zeros([ROWS], tl.int32) + newest
        table = block_tables + at * table_stride
        kv = (layer_keys, layer_values, table, kv_head, block_stride, slot_stride, kv_head_stride)
        acc, top, total = attend_split(
            q, positions, kv, split, oldest_key, newest, scale, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, SPLIT, KEYS, CAST
        )
        parts = (at * (num_kv_heads * GROUP) + heads) * num_splits + split
        store_parts(part_acc, part_stats, parts, acc, top, total, is_row, HEAD_DIM)


@triton.jit(do_not_specialize=["parallel_tokens", "num_splits"])
def merge_splits(
    out,
    lse,
    part_acc,
    part_stats,
    sinks,
    query_starts,
    kv_lens,
    parallel_tokens,
    num_splits,  # of `part_acc`
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (sequence * parallel_tokens + token, head) merges the splits of one row that were computed apart."""
    row, head = tl.program_id(0), tl.program_id(1)
    seq, token = row // parallel_tokens, row % parallel_tokens
    query_start = tl.load(query_starts + seq)
    num_tokens = tl.load(query_starts + seq + 1) - query_start
    if (num_tokens > parallel_tokens) | (token >= num_tokens):
        return
    position = tl.load(kv_lens + seq) - num_tokens + token
    oldest_key = 0
    if WINDOW > 0:
        oldest_key = tl.maximum(position - WINDOW + 1, 0)
    top = tl.full([1], MINUS_INFINITY, tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([1], 1.0, tl.float32)
    acc = tl.zeros([1, DIM], tl.float32)
    one, dims = tl.arange(0, 1), tl.arange(0, DIM)[None, :]
    first_part = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    for split in range(oldest_key // SPLIT, position // SPLIT + 1):
        part = first_part + split
        split_acc = tl.load(part_acc + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        split_top = tl.load(part_stats + part * 2 + one)
        split_total = tl.load(part_stats + part * 2 + 1 + one)
        acc, top, total = merge(acc, top, total, split_acc, split_top, split_total)
    result, row_lse = finish(acc, top, total)
    to = (query_start + token).to(tl.int64) * tl.num_programs(1) + head
    tl.store(out + to * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)
    if HAS_LSE:
        tl.store(lse + to + one, row_lse)
