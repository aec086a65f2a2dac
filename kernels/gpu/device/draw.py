"""From logits to tokens on the device: what `kernels.sampling` says, bit for bit, without a look from the host.

Three launches: the history's tokens are counted, the logits adjusted, a token drawn. Nothing is sorted: the k-th
largest logit, and the one at which the mass reaches p, are found by halving the range of the floats' order, each time
with one pass over the row. Masses are whole numbers, so no order of summing changes what reaches p; tokens that tie at
the threshold are kept in order of their ids.

A row's order is ORDER whole numbers (int64) and NUMBERS floats (float64); `kernels.gpu.draws` writes them.
"""

import triton
import triton.language as tl

from kernels.gpu.device.written_out import gumbel, weights

ORDER = tl.constexpr(16)
NUMBERS = tl.constexpr(8)
RESULT = tl.constexpr(4)

_HISTORY, _TOKENS, _PROMPT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_BIAS, _BIASES = tl.constexpr(3), tl.constexpr(4)
_BAN, _BANS = tl.constexpr(5), tl.constexpr(6)
_MASK, _WORDS = tl.constexpr(7), tl.constexpr(8)  # _WORDS -1: no mask
_TOP_K, _SEED, _POSITION, _CHOICE = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
_LOGPROBS = tl.constexpr(13)  # -1: none asked for
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TEMPERATURE, _TOP_P, _LOG_MIN_P = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)

_IN_PROMPT = tl.constexpr(1 << 30)  # beside the number of times that a token was put out
_OUTPUTS = tl.constexpr((1 << 30) - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_NOTHING = tl.constexpr(-2139095041)  # key of -inf
_LARGEST_INT = tl.constexpr(2147483647)


@triton.jit
def count_kernel(tokens, orders, counts, vocab, BLOCK: tl.constexpr):
    """Grid (rows, longest history / BLOCK). counts int32 [rows, V], zeros before and after a draw."""
    row = tl.program_id(0).to(tl.int64)
    order = orders + row * ORDER
    length = tl.load(order + _TOKENS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    token = tl.load(tokens + tl.load(order + _HISTORY) + at, mask=inside, other=0)
    prompt = at < tl.load(order + _PROMPT)
    place = counts + row * vocab + token
    tl.atomic_or(place, tl.full((BLOCK,), _IN_PROMPT, tl.int32), mask=inside & prompt, sem="relaxed")
    tl.atomic_add(place, tl.full((BLOCK,), 1, tl.int32), mask=inside & (at >= tl.load(order + _PROMPT)), sem="relaxed")


@triton.jit
def adjust_kernel(
    logits, counts, orders, numbers, bias_ids, biases, bans, mask_words, adjusted, logits_row, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, V / BLOCK). adjusted float32 [rows, V]. Counts are left zero."""
    row = tl.program_id(0).to(tl.int64)
    order = orders + row * ORDER
    number = numbers + row * NUMBERS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    values = tl.load(logits + row * logits_row + at, mask=inside, other=float("-inf"))

    first = tl.load(order + _BIAS)
    for i in range(first, first + tl.load(order + _BIASES)):
        values = tl.where(at == tl.load(bias_ids + i), values + tl.load(biases + i), values)
    values = tl.minimum(values, _LARGEST)

    if tl.load(order + _TOKENS) > 0:
        place = counts + row * vocab + at
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, tl.zeros((BLOCK,), tl.int32), mask=inside)
        repetition = tl.load(number + _REPETITION).to(tl.float32)
        divisor = tl.zeros((BLOCK,), tl.float32) + repetition
        penalized = tl.where(values > 0.0, tl.div_rn(values, divisor), values * repetition)
        values = tl.minimum(tl.where((count != 0) & (divisor != 1.0), penalized, values), _LARGEST)
        output = count & _OUTPUTS
        penalty = output.to(tl.float32) * tl.load(number + _FREQUENCY).to(tl.float32)
        penalty = penalty + tl.load(number + _PRESENCE).to(tl.float32)
        penalty = tl.minimum(tl.maximum(penalty, -_LARGEST), _LARGEST)
        values = tl.minimum(tl.where(output > 0, values - penalty, values), _LARGEST)

    first = tl.load(order + _BAN)
    for i in range(first, first + tl.load(order + _BANS)):
        values = tl.where(at == tl.load(bans + i), float("-inf"), values)

    words = tl.load(order + _WORDS)
    if words >= 0:
        word = tl.load(mask_words + tl.load(order + _MASK) + at // 32, mask=inside & (at // 32 < words), other=0)
        values = tl.where(((word >> (at % 32)) & 1) == 1, values, float("-inf"))
    tl.store(adjusted + row * vocab + at, values, mask=inside)


@triton.jit
def _key(values):
    """float32 -> int32 in the same order; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _likeliest(values, vocab, BLOCK: tl.constexpr):
    """Largest value of a row, the lowest id that has it, and whether a NaN is among them."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), _LARGEST_INT, tl.int32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < vocab, other=float("-inf"))
        strange = strange | (value != value).to(tl.int32)
        better = (value > best) | ((best_at == _LARGEST_INT) & (at < vocab))
        best = tl.where(better, value, best)
        best_at = tl.where(better, at, best_at)
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_at, _LARGEST_INT), axis=0)
    return highest, token, tl.max(strange, axis=0) > 0


@triton.jit
def greedy_kernel(logits, token_ids, highest, logits_row, vocab, BLOCK: tl.constexpr):
    """Grid (rows). token_ids int64 [rows], highest float32 [rows]: NaN where a logit is NaN."""
    row = tl.program_id(0).to(tl.int64)
    value, token, strange = _likeliest(logits + row * logits_row, vocab, BLOCK)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(highest + row, tl.where(strange, float("nan"), value))


@triton.jit
def _threshold(values, masses, vocab, needed, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on the tokens reach `needed` together: as many as that, or with so much mass.

    Between passes it lies in [low, high], both keys of tokens."""
    lowest = tl.full((BLOCK,), _LARGEST_INT, tl.int32)
    highest = tl.full((BLOCK,), _NOTHING, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _key(tl.load(values + at, mask=at < vocab, other=float("-inf")))
        there = key > _NOTHING
        if WEIGHED:
            there = there & (tl.load(masses + at, mask=at < vocab, other=0) > 0)
        lowest = tl.minimum(lowest, tl.where(there, key, _LARGEST_INT))
        highest = tl.maximum(highest, tl.where(there, key, _NOTHING))
    low = tl.min(lowest, axis=0)
    high = tl.max(highest, axis=0)
    while low < high:
        middle = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1  # above low, at most high
        amount = tl.zeros((BLOCK,), tl.int64)
        above = tl.full((BLOCK,), _LARGEST_INT, tl.int32)
        below = tl.full((BLOCK,), _NOTHING, tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = _key(tl.load(values + at, mask=at < vocab, other=float("-inf")))
            there = key > _NOTHING
            if WEIGHED:
                mass = tl.load(masses + at, mask=at < vocab, other=0)
                there = there & (mass > 0)
            else:
                mass = there.to(tl.int64)
            upper = key >= middle
            amount += tl.where(upper & there, mass, 0)
            above = tl.minimum(above, tl.where(upper & there, key, _LARGEST_INT))
            below = tl.maximum(below, tl.where(upper | (key <= _NOTHING) | ~there, _NOTHING, key))
        reached = tl.sum(amount, axis=0).to(tl.float64) >= needed
        low = tl.where(reached, tl.min(above, axis=0), low)
        high = tl.where(reached, high, tl.max(below, axis=0))
    return low


@triton.jit
def _kept_ties(values, masses, vocab, needed, threshold, top, temperature, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The last token id of those at the threshold that are kept: while what comes before stays under `needed`.

    WEIGHED: threshold is a score, else a key."""
    above = tl.zeros((BLOCK,), tl.int64)
    unit = tl.zeros((BLOCK,), tl.int64)  # what each of them weighs
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < vocab, other=float("-inf"))
        if WEIGHED:
            mass = tl.load(masses + at, mask=at < vocab, other=0)
            score = (value.to(tl.float64) - top) / temperature
            unit = tl.maximum(unit, tl.where(score == threshold, mass, 0))
        else:
            score = _key(value)
            mass = tl.full((BLOCK,), 1, tl.int64)
            unit = mass
        above += tl.where(score > threshold, mass, 0)
    before = tl.sum(above, axis=0)
    each = tl.max(unit, axis=0)
    last = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < vocab, other=float("-inf"))
        if WEIGHED:
            score = (value.to(tl.float64) - top) / temperature
            equal = (score == threshold) & (tl.load(masses + at, mask=at < vocab, other=0) > 0)
        else:
            equal = _key(value) == threshold
        equal = (equal & (at < vocab)).to(tl.int64)
        through = before + tl.cumsum(equal, axis=0) * each
        kept = (equal == 1) & ((through - each).to(tl.float64) < needed)
        last = tl.maximum(last, tl.where(kept, at, -1))
        before += tl.sum(equal, axis=0) * each
    return tl.max(last, axis=0)


@triton.jit
def draw_kernel(
    logits, adjusted, orders, numbers, masses, token_ids, results, raw, top_ids, top_logits, logits_row, vocab,
    top_width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). A program draws a row's token.

    adjusted float32 [rows, V], masses int64 [rows, V] (overwritten). token_ids int64 [rows]. results int64 [rows, 4]:
    fault (1 not finite, 2 nothing allowed), mass of the raw logits, top tokens. raw float32 [rows, 2]: logit of the
    token, largest logit. top_ids int32, top_logits float32 [rows, top_width], likeliest first.
    """
    row = tl.program_id(0).to(tl.int64)
    order = orders + row * ORDER
    number = numbers + row * NUMBERS
    logits = logits + row * logits_row
    adjusted = adjusted + row * vocab
    masses = masses + row * vocab
    highest, token, strange = _likeliest(logits, vocab, BLOCK)
    fault = 0
    if strange | (tl.abs(highest) == float("inf")):
        fault = 1
    top, token, _ = _likeliest(adjusted, vocab, BLOCK)
    if (fault == 0) & (top == float("-inf")):
        fault = 2
    temperature = tl.load(number + _TEMPERATURE)
    if (fault == 0) & (temperature != 0.0):
        token = _drawn(adjusted, masses, order, number, top.to(tl.float64), temperature, vocab, BLOCK)
    token = tl.where(fault == 0, token, 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(results + row * RESULT, fault.to(tl.int64))
    wanted = tl.load(order + _LOGPROBS)
    if (fault == 0) & (wanted >= 0):
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float64)
            total += weights(value - highest.to(tl.float64))
        tl.store(results + row * RESULT + 1, tl.sum(total, axis=0))
        tl.store(raw + row * 2, tl.load(logits + token))
        tl.store(raw + row * 2 + 1, highest)
        _top_tokens(logits, top_ids + row * top_width, top_logits + row * top_width, wanted, vocab, BLOCK)


@triton.jit
def _drawn(adjusted, masses, order, number, top, temperature, vocab, BLOCK: tl.constexpr):
    """Top-k, temperature, top-p, min-p, and the largest of score + noise."""
    key_from = tl.full((), _NOTHING, tl.int32)
    key_last = tl.full((), -1, tl.int32)
    top_k = tl.load(order + _TOP_K)
    if (top_k > 0) & (top_k < vocab):
        needed = top_k.to(tl.float64)
        key_from = _threshold(adjusted, masses, vocab, needed, False, BLOCK)
        key_last = _kept_ties(adjusted, masses, vocab, needed, key_from, top, temperature, False, BLOCK)
    score_from = tl.full((), float("-inf"), tl.float64)
    score_last = tl.full((), -1, tl.int32)
    top_p = tl.load(number + _TOP_P)
    if top_p < 1.0:
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(adjusted + at, mask=at < vocab, other=float("-inf"))
            key = _key(value)
            kept = (key > key_from) | ((key == key_from) & (at <= key_last))
            mass = tl.where(kept, weights((value.to(tl.float64) - top) / temperature), 0)
            tl.store(masses + at, mass, mask=at < vocab)
            total += mass
        tl.debug_barrier()  # other threads read what these wrote
        needed = top_p * tl.sum(total, axis=0).to(tl.float64)
        key = _threshold(adjusted, masses, vocab, needed, True, BLOCK)
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        score_from = (value.to(tl.float64) - top) / temperature
        score_last = _kept_ties(adjusted, masses, vocab, needed, score_from, top, temperature, True, BLOCK)
    least = tl.load(number + _LOG_MIN_P)
    seed = tl.load(order + _SEED)
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position, choice = tl.load(order + _POSITION).to(tl.uint32), tl.load(order + _CHOICE).to(tl.uint32)
    best = tl.full((BLOCK,), float("-inf"), tl.float64)
    best_at = tl.full((BLOCK,), _LARGEST_INT, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(adjusted + at, mask=at < vocab, other=float("-inf"))
        key = _key(value)
        score = (value.to(tl.float64) - top) / temperature
        kept = (key > key_from) | ((key == key_from) & (at <= key_last))
        kept = kept & ((score > score_from) | ((score == score_from) & (at <= score_last))) & (score >= least)
        noisy = score + gumbel(at.to(tl.uint32), position, choice, key_low, key_high)
        better = kept & (noisy > best)
        best = tl.where(better, noisy, best)
        best_at = tl.where(better, at, best_at)
    largest = tl.max(best, axis=0)
    return tl.min(tl.where(best == largest, best_at, _LARGEST_INT), axis=0)


@triton.jit
def _top_tokens(logits, top_ids, top_logits, wanted, vocab, BLOCK: tl.constexpr):
    """The likeliest `wanted` tokens one by one, each by a pass: below the last one, or equal with a higher id."""
    last = tl.full((), _LARGEST_INT, tl.int32)
    last_at = tl.full((), -1, tl.int32)
    for i in range(0, wanted):
        best = tl.full((BLOCK,), -_LARGEST_INT, tl.int32)
        best_at = tl.full((BLOCK,), _LARGEST_INT, tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = _key(tl.load(logits + at, mask=at < vocab, other=float("-inf")))
            left = (at < vocab) & ((key < last) | ((key == last) & (at > last_at)))
            better = left & (key > best)
            best = tl.where(better, key, best)
            best_at = tl.where(better, at, best_at)
        last = tl.max(best, axis=0)
        last_at = tl.min(tl.where(best == last, best_at, _LARGEST_INT), axis=0)
        tl.store(top_ids + i, last_at)
        tl.store(top_logits + i, tl.load(logits + last_at))
