"""The Triton kernels of operators.py and float8.py.

With `OVERLAPS`, a kernel starts while its predecessor still runs. It waits for the predecessor's end before it reads
results, and only then lets its successor start. So all earlier kernels have ended as well. Letting the successor start
earlier is slower: its waiting programs take the place of working ones.
"""

# No "from __future__ import annotations": Triton reads the annotations as objects.

import triton
import triton.language as tl


@triton.jit
def wait_for_others(OVERLAPS: tl.constexpr):
    """Wait for the predecessor. Before this call, a kernel may read only weights, which no kernel writes."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def multiply(
    vector,
    matrices,
    results,
    rows,
    up,
    scale,
    bias,
    residual,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One of three products: `matrix @ vector` for each of a tuple of matrices; for one matrix, times `scale`, plus
    `bias`, plus `residual`; or `silu(matrix @ vector) * (up @ vector)`. Unused arguments are None.

    Grid: blocks of rows, one matrix after the other.

    vector: [COLUMNS], matrices and up: [rows, COLUMNS], results, scale, bias and residual: [rows].
    """
    block_of_rows = tl.program_id(0)
    matrix, result, end = matrices[0], results[0], rows[0]
    start = 0
    for later in tl.static_range(1, len(matrices)):
        start += tl.cdiv(rows[later - 1], BLOCK_ROWS)
        is_later = tl.program_id(0) >= start
        block_of_rows = tl.where(is_later, tl.program_id(0) - start, block_of_rows)
        matrix, result = tl.where(is_later, matrices[later], matrix), tl.where(is_later, results[later], result)
        end = tl.where(is_later, rows[later], end)
    row = block_of_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    is_row = row < end
    is_weight = is_row[:, None] & (column[None, :] < COLUMNS)
    place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    block = tl.load(matrix + place, mask=is_weight, other=0.0)
    if up is not None:
        up_block = tl.load(up + place, mask=is_weight, other=0.0)
        up_total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    wait_for_others(OVERLAPS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in tl.static_range(0, COLUMNS, BLOCK_COLUMNS):
        if first + BLOCK_COLUMNS < COLUMNS:  # load the next block while this one is multiplied
            next_place = place + first + BLOCK_COLUMNS
            is_next = is_row[:, None] & (column[None, :] < COLUMNS - first - BLOCK_COLUMNS)
            next_block = tl.load(matrix + next_place, mask=is_next, other=0.0)
            if up is not None:
                next_up_block = tl.load(up + next_place, mask=is_next, other=0.0)
        part = tl.load(vector + first + column, mask=column < COLUMNS - first, other=0.0).to(tl.float32)
        total += block.to(tl.float32) * part[None, :]
        if up is not None:
            up_total += up_block.to(tl.float32) * part[None, :]
        if first + BLOCK_COLUMNS < COLUMNS:
            block = next_block
            if up is not None:
                up_block = next_up_block
    product = tl.sum(total, axis=1)
    if scale is not None:
        product *= tl.load(scale + row, mask=is_row, other=0.0)
    if bias is not None:
        product += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if up is not None:
        kind = result.dtype.element_ty
        product = product.to(kind).to(tl.float32)
        product = (product * tl.sigmoid(product)).to(kind).to(tl.float32)
        product *= tl.sum(up_total, axis=1).to(kind).to(tl.float32)
    if residual is not None:
        product = product.to(result.dtype.element_ty).to(tl.float32)
        product += tl.load(residual + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(result + row, product.to(result.dtype.element_ty), mask=is_row)


@triton.jit
def normalize(vector, weight, result, epsilon, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    """`vector` divided by its root mean square, rounded, times `weight`. Grid: (1,). Every tensor: [SIZE]."""
    column = tl.arange(0, PADDED_SIZE)
    is_column = column < SIZE
    factors = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_others(OVERLAPS)
    values = tl.load(vector + column, mask=is_column, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    kind = result.dtype.element_ty
    tl.store(result + column, (values.to(kind).to(tl.float32) * factors).to(kind), mask=is_column)


@triton.jit
def attend_part(
    query,
    key,
    value,
    position,
    partial,
    sums,
    scale,
    tokens,
    heads,
    window,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attention of the `GROUP` query heads of one key-value head over one of `PARTS` parts of the filled tokens.

    Grid: (key-value heads, PARTS). Writes weighted values to partial, [heads, PARTS, VALUE_SIZE]; the largest score to
    sums[0] and the sum of weights to sums[1], [heads, PARTS] each. An empty part has minus infinity and 0.
    """
    wait_for_others(OVERLAPS)
    key_head = tl.program_id(0)
    part = tl.program_id(1)
    end = tl.load(position).to(tl.int32) + 1
    start = 0
    if window > 0:
        start = tl.maximum(0, end - window)
    # The parts are as even as whole blocks allow.
    part_tokens = tl.cdiv(tl.cdiv(end - start, PARTS), BLOCK) * BLOCK
    first = start + part * part_tokens
    last = tl.minimum(first + part_tokens, end)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_SIZE)
    value_column = tl.arange(0, PADDED_VALUE_SIZE)
    head = key_head * GROUP + row
    is_row = row < GROUP
    queries = tl.load(
        query + head[:, None] * SIZE + column[None, :], mask=is_row[:, None] & (column[None, :] < SIZE), other=0.0
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, PADDED_VALUE_SIZE], tl.float32)
    for block in range(first, last, BLOCK):
        token = block + tl.arange(0, BLOCK)
        is_token = token < last
        keys = tl.load(
            key + (key_head * tokens + token[None, :]) * SIZE + column[:, None],
            mask=is_token[None, :] & (column[:, None] < SIZE),
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if softcap > 0:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        values = tl.load(
            value + (key_head * tokens + token[:, None]) * VALUE_SIZE + value_column[None, :],
            mask=is_token[:, None] & (value_column[None, :] < VALUE_SIZE),
            other=0.0,
        )
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        largest = new_largest
    place = head * PARTS + part
    tl.store(
        partial + place[:, None] * VALUE_SIZE + value_column[None, :],
        gathered,
        mask=is_row[:, None] & (value_column[None, :] < VALUE_SIZE),
    )
    tl.store(sums + place, largest, mask=is_row)
    tl.store(sums + heads * PARTS + place, total, mask=is_row)


@triton.jit
def join_parts(
    partial,
    sums,
    result,
    heads,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Join the parts of one head. Result: [heads, VALUE_SIZE]. Grid: (heads,)."""
    wait_for_others(OVERLAPS)
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, PADDED_VALUE_SIZE)
    largest = tl.load(sums + head * PARTS + part)
    total = tl.load(sums + heads * PARTS + head * PARTS + part)
    share = tl.exp(largest - tl.max(largest, axis=0))
    place = head * PARTS + part
    gathered = tl.load(
        partial + place[:, None] * VALUE_SIZE + column[None, :], mask=column[None, :] < VALUE_SIZE, other=0.0
    )
    joined = tl.sum(gathered * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(result + head * VALUE_SIZE + column, joined.to(result.dtype.element_ty), mask=column < VALUE_SIZE)


@triton.jit
def to_float8(
    rows,
    values,
    scales,
    COLUMNS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A row as float8, whose largest value is `LARGEST`, and its scale.

    Grid: rows. rows and values: [rows, COLUMNS], scales: [rows].
    """
    wait_for_others(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_COLUMNS)
    is_inside = columns < COLUMNS
    numbers = tl.load(rows + row * COLUMNS + columns, mask=is_inside, other=0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST)
    tl.store(scales + row, largest * (1 / LARGEST))
    tl.store(values + row * COLUMNS + columns, (numbers * (LARGEST / largest)).to(tl.float8e4nv), mask=is_inside)
