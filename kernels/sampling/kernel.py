"""Sampling in Triton: a program takes a row of logits and reads it a few times; nothing is sorted or waited for.

What is drawn is what `randomness`, `truncation` and `draw` define; this file says the same for a GPU:

* `best_kernel`: the largest logit, its first id, and the logarithm of the sum of all exponentials.
* `adjust_kernel`, `bias_kernel`: penalties and the grammar's mask; bias and suppressed ids.
* `candidates_kernel`: a row's best few, those that could decide top-k or top-p, without their order.
* `floor_kernel`: the smallest weight that stays, found by halving the range of a float's bits: 30 halvings tell it
  exactly, each a count or a sum over the candidates (or, where they don't decide, over the whole row).
* `race_kernel`: the race of exponential clocks.

A row's sums don't depend on its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.draw import HEAD_WEIGHT as HEAD
from kernels.sampling.options import PROMPT_COUNT

HEAD_WEIGHT = tl.constexpr(HEAD)
TAIL_ID = tl.constexpr(0xFFFFFFFF)
GREEDY_BELOW = tl.constexpr(1e-4)
PROMPT_BIT = tl.constexpr(PROMPT_COUNT)
ONE_BITS = tl.constexpr(0x3F800000)
BINS = tl.constexpr(256)
BINS_PER_NAT = tl.constexpr(8.0)


@triton.jit
def mixed(x):
    """`mix` of kernels.sampling.randomness, on 32 bits."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def exponentials(ids, key0, key1):
    """-ln(u) of the candidates `ids`, uint32, under a row's two key words."""
    hashed = mixed(mixed(ids * 0x9E3779B1 + key0) ^ key1)
    return -tl.log(((hashed >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0))


@triton.jit
def weights_of(values, at, count, best, temperature):
    """exp((x - best) / temperature) of values[at], 0 from `count` on."""
    x = tl.load(values + at, mask=at < count, other=float("-inf")).to(tl.float32)
    return tl.exp((x - best) / temperature)


@triton.jit
def best_kernel(logits, best, best_ids, log_totals, vocab_size, stride, TILE: tl.constexpr):
    """Of row `program 0`; `best` is NaN when the row holds NaN or +inf, -inf when it holds nothing else."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    lane_best = tl.full((TILE,), float("-inf"), tl.float32)
    lane_id = lane * 0
    lane_total = tl.zeros((TILE,), tl.float32)
    broken = lane * 0
    for first in range(0, vocab_size, TILE):
        at = first + lane
        x = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        sound = x < float("inf")
        broken += 1 - sound.to(tl.int32)
        x = tl.where(sound, x, float("-inf"))
        higher = x > lane_best
        grown = tl.where(higher, x, lane_best)
        base = tl.where(grown == float("-inf"), 0.0, grown)
        lane_total = lane_total * tl.exp(lane_best - base) + tl.exp(x - base)
        lane_id = tl.where(higher, at, lane_id)
        lane_best = grown
    top = tl.max(lane_best, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(lane_total * tl.exp(lane_best - base), axis=0)
    tl.store(best_ids + row, tl.min(tl.where(lane_best == top, lane_id, vocab_size - 1), axis=0))
    tl.store(log_totals + row, base + tl.log(tl.maximum(total, 1e-38)))
    tl.store(best + row, tl.where(tl.sum(broken, axis=0) > 0, float("nan"), top))


@triton.jit
def adjust_kernel(
    logits,
    rows,
    counts,
    count_rows,
    repetition,
    frequency,
    presence,
    masks,
    mask_rows,
    vocab_size,
    mask_words,
    stride,
    TILE: tl.constexpr,
):
    """Penalties, then the mask, on tile `program 1` of row rows[program 0], in place.

    `counts` (slots, vocab_size) says how often each id stands in the output, with PROMPT_BIT for the prompt; `masks`
    (n, mask_words) has a bit per id that may come. A row of counts or masks below 0 is none.
    """
    change, at = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < vocab_size
    row = tl.load(rows + change).to(tl.int64)
    x = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    count_row = tl.load(count_rows + change).to(tl.int64)
    if count_row >= 0:
        count = tl.load(counts + count_row * vocab_size + at, mask=inside, other=0)
        times = (count & (PROMPT_BIT - 1)).to(tl.float32)
        gain = tl.load(repetition + change)
        penalised = tl.where(x > 0, x / gain, x * gain)
        x = tl.where(count != 0, penalised, x)
        x = x - tl.load(frequency + change) * times - tl.load(presence + change) * tl.minimum(times, 1.0)
    mask_row = tl.load(mask_rows + change).to(tl.int64)
    if mask_row >= 0:
        word = tl.load(masks + mask_row * mask_words + at // 32, mask=inside, other=0)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
    tl.store(logits + row * stride + at, x, mask=inside)


@triton.jit
def bias_kernel(logits, rows, ids, values, entries, stride, TILE: tl.constexpr):
    """Adds values[i] to logits[rows[i], ids[i]]; -inf for an id that must not come."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = entry < entries
    row = tl.load(rows + entry, mask=inside, other=0).to(tl.int64)
    token = tl.load(ids + entry, mask=inside, other=0)
    value = tl.load(values + entry, mask=inside, other=0.0)
    tl.atomic_add(logits + row * stride + token, value, mask=inside)


@triton.jit
def candidates_kernel(
    logits,
    best,
    temperatures,
    top_k,
    top_p,
    candidates,
    candidate_counts,
    totals,
    vocab_size,
    stride,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logits of row `program 0` above a bound that CAPACITY of them fit; and the sum of all weights.

    Logits are counted in bins of 1/8 nat below the best, and whole bins are taken, the best first.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    temperature, top = tl.load(temperatures + row), tl.load(best + row)
    cuts = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0)
    if cuts & (temperature >= GREEDY_BELOW):
        histogram = tl.zeros((BINS,), tl.int32)
        lane_total = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            at = first + lane
            x = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            lane_total += tl.exp((x - top) / temperature)
            bins = tl.minimum((top - x) / temperature * BINS_PER_NAT, BINS - 1.0).to(tl.int32)
            histogram += tl.histogram(bins, BINS)
        taken = tl.sum((tl.cumsum(histogram, axis=0) <= CAPACITY).to(tl.int32), axis=0)
        found = taken * 0
        for first in range(0, vocab_size, TILE):
            at = first + lane
            x = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            bins = tl.minimum((top - x) / temperature * BINS_PER_NAT, BINS - 1.0).to(tl.int32)
            kept = ((bins < taken) & (at < vocab_size)).to(tl.int32)
            place = found + tl.cumsum(kept, axis=0) - kept
            tl.store(candidates + row * CAPACITY + place, x, mask=kept != 0)
            found += tl.sum(kept, axis=0)
        tl.store(candidate_counts + row, found)
        tl.store(totals + row, tl.sum(lane_total, axis=0))


@triton.jit
def above(values, count, best, temperature, floor_bits, TILE: tl.constexpr):
    """How many weights lie above a bound given as a float's bits, and their sum."""
    lane = tl.arange(0, TILE)
    floor = floor_bits.to(tl.float32, bitcast=True)
    lane_count = lane * 0
    lane_sum = tl.zeros((TILE,), tl.float32)
    for first in range(0, count, TILE):
        at = first + lane
        weight = weights_of(values, at, count, best, temperature)
        higher = (weight > floor) & (at < count)
        lane_count += higher.to(tl.int32)
        lane_sum += tl.where(higher, weight, 0.0)
    return tl.sum(lane_count, axis=0), tl.sum(lane_sum, axis=0)


@triton.jit
def floor_among(values, count, best, temperature, k, p, total, TILE: tl.constexpr):
    """The smallest weight that top-k and then top-p keep, as bits, from values that hold all that could decide."""
    # The smallest bound with fewer than k weights above it is the k-th largest weight.
    low = count * 0 - 1
    high = count * 0 + ONE_BITS
    if k > 0:
        while high - low > 1:
            middle = (low + high) // 2
            number, _ = above(values, count, best, temperature, middle, TILE)
            if number < k:
                high = middle
            else:
                low = middle
        number, heavy = above(values, count, best, temperature, high, TILE)
        total = heavy + (k - number).to(tl.float32) * high.to(tl.float32, bitcast=True)
        low = high - 1
        high = count * 0 + ONE_BITS
    if p < 1.0:
        while high - low > 1:
            middle = (low + high) // 2
            _, heavy = above(values, count, best, temperature, tl.maximum(middle, 0), TILE)
            if heavy < p * total:
                high = middle
            else:
                low = middle
        low = high - 1
    return tl.maximum(low + 1, 0)


@triton.jit
def floor_kernel(
    logits,
    best,
    temperatures,
    top_k,
    top_p,
    min_p,
    candidates,
    candidate_counts,
    totals,
    floors,
    vocab_size,
    stride,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """The smallest weight that stays in row `program 0`, at least min_p."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top, floor = tl.load(temperatures + row), tl.load(best + row), tl.load(min_p + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    k = tl.where(k < vocab_size, k, 0)
    if ((k > 0) | (p < 1.0)) & (temperature >= GREEDY_BELOW) & (top > float("-inf")):
        found, total = tl.load(candidate_counts + row), tl.load(totals + row)
        few = candidates + row * CAPACITY
        _, held = above(few, found, top, temperature, found * 0, TILE)
        if ((k > 0) & (found >= k)) | ((k == 0) & (held > p * total)):
            bits = floor_among(few, found, top, temperature, k, p, total, TILE)
        else:
            bits = floor_among(logits + row * stride, found * 0 + vocab_size, top, temperature, k, p, total, TILE)
        floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    tl.store(floors + row, floor)


@triton.jit
def race_kernel(
    logits,
    best,
    best_ids,
    temperatures,
    floors,
    keys,
    counts,
    count_rows,
    tokens,
    vocab_size,
    stride,
    TILE: tl.constexpr,
):
    """Draws for row `program 0`, and counts what it drew where the row has counts; a row without candidates gives 0."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    temperature, top, floor = tl.load(temperatures + row), tl.load(best + row), tl.load(floors + row)
    drawn = tl.load(best_ids + row)
    possible = top > float("-inf")
    if possible & (temperature >= GREEDY_BELOW):
        key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
        lane_pace = tl.zeros((TILE,), tl.float32)
        lane_id = lane * 0
        lane_tail = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            at = first + lane
            weight = weights_of(logits + row * stride, at, vocab_size, top, temperature)
            head = (weight >= HEAD_WEIGHT) & (weight >= floor)
            pace = tl.where(head, weight, 0.0) / exponentials(at.to(tl.uint32), key0, key1)
            lane_id = tl.where(pace > lane_pace, at, lane_id)
            lane_pace = tl.maximum(pace, lane_pace)
            lane_tail += tl.where((weight < HEAD_WEIGHT) & (weight >= floor), weight, 0.0)
        quickest = tl.max(lane_pace, axis=0)
        drawn = tl.min(tl.where(lane_pace == quickest, lane_id, vocab_size - 1), axis=0)
        tail_clocks = exponentials((lane * 0).to(tl.uint32) + TAIL_ID, key0, key1)
        tail_clock = tl.max(tail_clocks, axis=0)
        if tl.sum(lane_tail, axis=0) > quickest * tail_clock:
            lane_pace = lane_pace * 0.0
            for first in range(0, vocab_size, TILE):
                at = first + lane
                weight = weights_of(logits + row * stride, at, vocab_size, top, temperature)
                tail = (weight < HEAD_WEIGHT) & (weight >= floor)
                pace = tl.where(tail, weight, 0.0) / exponentials(at.to(tl.uint32), key0, key1)
                lane_id = tl.where(pace > lane_pace, at, lane_id)
                lane_pace = tl.maximum(pace, lane_pace)
            quickest = tl.max(lane_pace, axis=0)
            drawn = tl.min(tl.where(lane_pace == quickest, lane_id, vocab_size - 1), axis=0)
    tl.store(tokens + row, drawn)
    count_row = tl.load(count_rows + row).to(tl.int64)
    if possible & (count_row >= 0):
        place = counts + count_row * vocab_size + drawn
        tl.store(place, tl.load(place) + 1)
