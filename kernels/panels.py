"""Weights as a file has quantized them (`kernels.formats`), in panels for the Triton kernels.

A panel holds 32 rows and as many columns as share a scale, but at least 128: K is padded with scales of zero. It has one
or two K blocks of 128 columns. In such a block a row has 16 slots: slot i holds the codes of columns i, i + 16, ...,
i + 112, the first one in the lowest bits. The slots of the low bits of all rows come first, then those of the high bits.
Where a code has 8 bits, its slot is two words, each for 64 columns.

Behind the codes of a block lie words, one of each kind for every row: small scales and small mins as bytes (two nibbles of
one byte where a code has 2 bits), and scales in fp16, as pairs of scale and min where there are minima. If a scale belongs
to 256 columns, the pairs of scale and min (or 0) lie at the end of the panel.

The panels of 32 rows lie behind one another. Then come those of the next 32 rows, and behind the last ones the rows of the
next format. A weight has a tuple of formats: of each the number of its rows, and `Format.numbers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import constexpr, dot, jit, tl, triton
from kernels.formats import Blocks, Format, Part

ROWS = 32  # of a panel
NUMBERS = 10  # of a format, with its rows
Forms = tuple[tuple[int, ...], ...]
# Where a fact lies in a format as `kernel_forms` gives it to kernels. FIRST and LAST are the halves of a table.
BEGIN, END, LOW, HIGH, GROUP, UNIT, OFFSET, NESTED, MINIMA, FIRST, LAST = map(constexpr, range(11))
# Words of a K block; of a row with bytes of small scales; with bytes of small mins; with fp16 values of this block.
BLOCK, SMALL, SMALL_MINS, PAIRS = map(constexpr, range(11, 15))


def _words(form: Format) -> tuple[int, int, int, int]:
    """BLOCK, SMALL, SMALL_MINS and PAIRS of a format."""
    small = 32 // form.group if form.nested else 0
    small_mins = small if form.minima and not form.nibbles else 0
    pairs = 0 if form.unit > 128 else 4 if form.minima else 2
    return 128 * (form.low + form.high) + ROWS * (small + small_mins + pairs), small, small_mins, pairs


def panel_shape(form: Format) -> tuple[int, int]:
    """The columns and the int32 words of a panel."""
    blocks = max(1, form.unit // 128)
    return 128 * blocks, blocks * _words(form)[0] + ROWS * (blocks > 1)


def panels_bytes(form: Format, n: int, k: int) -> int:
    """The bytes of n rows of k columns."""
    columns, words = panel_shape(form)
    return 4 * -(-n // ROWS) * -(-k // columns) * words


def fits_panels(shapes: Sequence[tuple[int, int]], forms: Sequence[Format]) -> bool:
    """Whether matrices of these shapes and formats can be the rows of one weight: none ends inside a panel but the last."""
    whole = all(n % ROWS == 0 for n, _ in shapes[:-1])
    return whole and all(k % form.unit == 0 for (_, k), form in zip(shapes, forms, strict=True))


def kernel_forms(forms: Forms) -> Forms:
    """A weight's formats as kernels take them. The rows of a single one count as 0, so that they choose no instructions."""
    found, begin = [], 0
    for rows, *numbers in forms:
        end = begin + rows if len(forms) > 1 else 0
        found.append((begin, end, *numbers, *_words(Format.from_numbers(numbers))))
        begin = end
    return tuple(found)


# ---- packing ---------------------------------------------------------------------------------------------------


def to_panels(piece: Blocks, form: Format) -> Tensor:
    """Some rows in panels, int32 [rows / 32 rounded up, K / columns of a panel, words]."""
    n, k = piece.codes.shape
    columns, _ = panel_shape(form)
    more = -n % ROWS, -k % columns

    def rows(values: Tensor, per: int) -> Tensor:
        """Values of `per` columns each [n, k / per] -> [panels of rows, blocks, 32, values of a block]."""
        padded = F.pad(values, (0, more[1] // per, 0, more[0]))
        return padded.view(-1, ROWS, (k + more[1]) // columns, columns // per).transpose(1, 2)

    def blocks(values: Tensor) -> Tensor:
        return values.unflatten(-1, (columns // 128, -1)).transpose(-3, -2)  # [..., K blocks of a panel, 32, values]

    codes = blocks(rows(piece.codes, 1))
    parts = [_slots(codes & (2**form.low - 1), form.low)]
    if form.high:
        parts.append(_slots(codes >> form.low, form.high))
    if form.nested:
        small, mins = piece.sub_scales.view(torch.uint8), piece.sub_mins
        small = small | mins << 4 if form.nibbles and form.minima else small
        for values in (small, mins) if form.minima and not form.nibbles else (small,):
            parts.append(_words_of(blocks(rows(values, form.group))))
    large = [rows(piece.scales, form.unit)]
    if form.minima or form.unit > 128:
        large.append(rows(piece.mins, form.unit) if form.minima else torch.zeros_like(large[0]))
    pairs = torch.stack(large, -1).flatten(-2)
    if form.unit > 128:
        return torch.cat((torch.cat(parts, -1).flatten(-2), _words_of(pairs)), -1)
    return torch.cat((*parts, _words_of(blocks(pairs))), -1).flatten(-2)


def pack(parts: Sequence[Part], device: torch.device | str) -> Tensor:
    """The parts of one weight as words, the pieces of each behind one another."""
    sizes = [panels_bytes(part.form, part.n, part.k) // 4 for part in parts]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    for part, place in zip(parts, words.split(sizes), strict=True):
        at = 0
        for piece in part.pieces:
            packed = to_panels(piece, part.form).flatten()
            place[at : at + len(packed)] = packed
            at += len(packed)
    return words


def _slots(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., 32, 128] -> the words of their slots."""
    planes = codes.unflatten(-1, (-1, min(8, 32 // bits), 16)).to(torch.int32)  # [..., 32, words of a slot, planes, 16]
    packed = planes[..., 0, :].clone()
    for plane in range(1, planes.shape[-2]):
        packed |= planes[..., plane, :] << bits * plane
    packed = packed.transpose(-3, -2).flatten(-3).to(SLOTS.get(bits, torch.int32))
    return packed.view(torch.int32)


SLOTS = {1: torch.uint8, 2: torch.int16}  # what holds a slot of codes of so many bits, if it is no word


def _words_of(values: Tensor) -> Tensor:
    """Values [..., 32, bytes of whole words] -> words, those of one kind for all rows behind one another."""
    return values.contiguous().view(torch.int32).transpose(-2, -1).flatten(-2)


def from_panels(words: Tensor, form: Format, n: int, k: int) -> Blocks:
    """The inverse of `to_panels`: n rows of k columns of words as it returns them."""
    block, small, small_mins, pairs = _words(form)
    count = panel_shape(form)[0] // 128
    blocks = words[..., : count * block].unflatten(-1, (count, block))  # [rows / 32, panels, blocks, words]

    def rows(values: Tensor) -> Tensor:
        """[rows / 32, panels, blocks, 32, values] -> [rows, values of a row]"""
        return values.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:n]

    def slots(at: int, bits: int) -> Tensor:
        packed = blocks[..., at : at + 128 * bits].contiguous().view(SLOTS.get(bits, torch.int32)).to(torch.int32)
        packed = packed.unflatten(-1, (-1, ROWS, 16)).transpose(-3, -2)[..., None, :]
        shifts = bits * torch.arange(min(8, 32 // bits), dtype=torch.int32, device=words.device)[:, None]
        return rows((packed >> shifts & (2**bits - 1)).flatten(-3))[:, :k].to(torch.uint8)

    def kind(part: Tensor, at: int, each: int, dtype: torch.dtype) -> Tensor:
        own = part[..., at : at + ROWS * each].unflatten(-1, (each, ROWS)).transpose(-2, -1)
        return rows(own.contiguous().view(dtype))

    codes = slots(0, form.low)
    if form.high:
        codes |= slots(128 * form.low, form.high) << form.low
    at = 128 * (form.low + form.high)
    sub = kind(blocks, at, small, torch.uint8) if form.nested else None
    sub_mins = kind(blocks, at + ROWS * small, small_mins, torch.uint8) if small_mins else None
    if form.nibbles and form.minima:
        sub, sub_mins = sub & 15, sub >> 4
    tail = words[:, :, None, count * block :]
    large = (
        kind(blocks, at + ROWS * (small + small_mins), pairs, torch.float16)
        if pairs
        else kind(tail, 0, 1, torch.float16)
    )
    scales, mins = (large[:, ::2], large[:, 1::2]) if form.minima or not pairs else (large, None)
    parts = [scales[:, : k // form.unit], mins[:, : k // form.unit] if form.minima else None]
    subs = [
        None if t is None else t[:, : k // form.group] for t in (sub if sub is None else sub.view(torch.int8), sub_mins)
    ]
    return Blocks(codes, *parts, *subs)


def matrix(words: Tensor, forms: Forms, n: int, k: int) -> Tensor:
    """The values [..., n, k] of a weight in float32 (`Blocks.floats`), from its words [..., all of them]."""
    if words.dim() > 1:
        return torch.stack([matrix(expert, forms, n, k) for expert in words])
    found, at = [], 0
    for rows, *numbers in forms:
        form = Format.from_numbers(numbers)
        size = panels_bytes(form, rows, k) // 4
        shape = -(-rows // ROWS), -1, panel_shape(form)[1]
        found.append(from_panels(words[at : at + size].view(shape), form, rows, k).floats(form))
        at += size
    return torch.cat(found)


# ---- kernels ---------------------------------------------------------------------------------------------------


@jit
def panels_words(rows, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The words of so many rows of format I."""
    if FORMS[I][UNIT] > 128:
        return tl.cdiv(rows, 32) * (K // 256) * (2 * FORMS[I][BLOCK] + 32)
    else:
        return tl.cdiv(rows, 32) * tl.cdiv(K, 128) * FORMS[I][BLOCK]


@jit
def weight_words(N, K, FORMS: tl.constexpr):
    """The words of a weight of N rows."""
    if len(FORMS) == 1:
        return panels_words(N, K, FORMS, 0)
    else:
        size = 0
        for i in tl.static_range(len(FORMS)):
            size += panels_words(FORMS[i][END] - FORMS[i][BEGIN], K, FORMS, i)
        return size


@jit
def _block_at(rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """(the first word of K block b of the panels of these rows, the word of their fp16 values)."""
    panel = (rows // 32).to(tl.int64)
    if FORMS[I][UNIT] > 128:
        SIZE: tl.constexpr = 2 * FORMS[I][BLOCK] + 32
        at = panel * (K // 256 * SIZE) + (b // 2) * SIZE
        return at + b % 2 * FORMS[I][BLOCK], at + 2 * FORMS[I][BLOCK] + rows % 32
    else:
        at = panel * (tl.cdiv(K, 128) * FORMS[I][BLOCK]) + b * FORMS[I][BLOCK]
        return at, at + (FORMS[I][BLOCK] - 32 * FORMS[I][PAIRS]) + rows % 32


@jit
def _word(w, at, i: tl.constexpr, USED: tl.constexpr):
    """Word i of every row, or a placeholder."""
    return tl.load(w + at + 32 * i) if USED else at.to(tl.int32)


@jit
def load_factors(w, rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The words with the factors of these rows in K block b: 4 of fp16 values, 2 of small scales, 2 of small mins."""
    at, pair = _block_at(rows, b, K, FORMS, I)
    PAIR: tl.constexpr = FORMS[I][PAIRS]
    S: tl.constexpr = FORMS[I][SMALL]
    M: tl.constexpr = FORMS[I][SMALL_MINS]
    at += 128 * (FORMS[I][LOW] + FORMS[I][HIGH]) + rows % 32
    return (
        _word(w, pair, 0, True), _word(w, pair, 1, PAIR > 1), _word(w, pair, 2, PAIR > 2), _word(w, pair, 3, PAIR > 3),
        _word(w, at, 0, S > 0), _word(w, at, 1, S > 1), _word(w, at, S, M > 0), _word(w, at, S + 1, M > 1),
    )  # fmt: skip


@jit
def load_codes(w, halves, bytes, rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The slots of these rows in K block b: of the low bits, of columns from 64 on if these are apart, of the high bits.

    halves and bytes: the words w as int16 and uint8.
    """
    L: tl.constexpr = FORMS[I][LOW]
    H: tl.constexpr = FORMS[I][HIGH]
    at, _ = _block_at(rows, b, K, FORMS, I)
    at = at[:, None]
    slot = (rows % 32 * 16)[:, None] + tl.arange(0, 16)[None, :]
    if L == 2:
        low = tl.load(halves + at * 2 + slot, eviction_policy="evict_first")
    else:
        low = tl.load(w + at + slot, eviction_policy="evict_first")
    far = tl.load(w + at + 512 + slot, eviction_policy="evict_first") if L == 8 else low
    if H == 2:
        high = tl.load(halves + (at + 128 * L) * 2 + slot, eviction_policy="evict_first")
    elif H == 1:
        high = tl.load(bytes + (at + 128 * L) * 4 + slot, eviction_policy="evict_first")
    else:
        high = low
    return low, far, high


@jit
def _half(words, i: tl.constexpr):
    """fp16 value i of pairs in words, in float32."""
    word = words[i // 2]
    return ((word >> 16 * (i % 2)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def group_factors(words, g: tl.constexpr, FORMS: tl.constexpr, I: tl.constexpr):
    """(scale, what is added) of the rows in group g of a block, in float32. Both products are exact."""
    G: tl.constexpr = FORMS[I][GROUP]
    WIDE: tl.constexpr = FORMS[I][UNIT] > 128
    M: tl.constexpr = FORMS[I][MINIMA]
    u: tl.constexpr = 0 if WIDE else g * G // 32
    scale = _half(words, 2 * u if M or WIDE else u)
    low = _half(words, 2 * u + 1) if M else scale
    if FORMS[I][NESTED]:
        at: tl.constexpr = 8 * (g % 4)
        small = words[4 + g // 4]
        if FORMS[I][SMALL_MINS] == 0 and M:
            scale *= ((small >> at) & 15).to(tl.float32)
            low *= ((small >> at + 4) & 15).to(tl.float32)
        else:
            scale *= ((small << 24 - at) >> 24).to(tl.float32)
            if M:
                low *= ((words[6 + g // 4] >> at) & 255).to(tl.float32)
    return scale, low


@jit
def plane_values(codes, scale, low, p: tl.constexpr, FORMS: tl.constexpr, I: tl.constexpr):
    """The values of columns 16 p to 16 p + 15 of a block, in float32. Only adding a min rounds them."""
    L: tl.constexpr = FORMS[I][LOW]
    H: tl.constexpr = FORMS[I][HIGH]
    if L == 8:
        code = ((codes[0] if p < 4 else codes[1]) >> 8 * (p % 4)) & 255
    else:
        code = (codes[0].to(tl.int32) >> L * p) & (2**L - 1)
    if H > 0:
        code |= ((codes[2].to(tl.int32) >> H * p) & (2**H - 1)) << L
    if FORMS[I][FIRST] != 0 or FORMS[I][LAST] != 0:
        half = tl.where(
            code < 8, tl.full(code.shape, FORMS[I][FIRST], tl.int64), tl.full(code.shape, FORMS[I][LAST], tl.int64)
        )
        code = (half >> (code & 7) * 8).to(tl.int32) & 255
    # 2^23 with a code as its last bits is a float, and quicker to make than by a conversion.
    value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + FORMS[I][OFFSET])
    value *= scale[:, None]
    return value + low[:, None] if FORMS[I][MINIMA] else value


@jit
def _multiply_panel(
    acc, w, halves, bytes, words, x, tokens, live, rows, b, K, FORMS: tl.constexpr, I: tl.constexpr, EVEN_K: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """acc[BN, BT] += W[rows] @ x[tokens]^T over K block b, where the rows have format I and the factors `words`."""
    DT: tl.constexpr = x.dtype.element_ty
    codes = load_codes(w, halves, bytes, rows, b, K, FORMS, I)
    for p in tl.static_range(8):
        if p * 16 % FORMS[I][GROUP] == 0:
            scale, low = group_factors(words, p * 16 // FORMS[I][GROUP], FORMS, I)
        k = b * 128 + p * 16 + tl.arange(0, 16)
        mask = live[None, :] if EVEN_K else live[None, :] & (k < K)[:, None]
        xp = tl.load(x + tokens[None, :] * K + k[:, None], mask=mask, other=0, eviction_policy="evict_last")
        acc = dot(plane_values(codes, scale, low, p, FORMS, I).to(DT), xp, acc, NATIVE)
    return acc


@jit
def _panel_loop(
    acc, up, x, w, halves, bytes, tokens, live, rn, first, last, K, COUNT, N_OUT, FORMS: tl.constexpr, I: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of weight rows rn (and rn + N_OUT) of the COUNT rows of format I over the K blocks [first, last)."""
    rows = tl.minimum(rn, COUNT - 1)  # rows past the end are read as the last row, and their products are not stored
    up_rows = tl.minimum(rn + N_OUT, COUNT - 1)
    for b in range(first, last):
        words = load_factors(w, rows, b, K, FORMS, I)
        acc = _multiply_panel(acc, w, halves, bytes, words, x, tokens, live, rows, b, K, FORMS, I, EVEN_K, NATIVE)
        if GATED:
            words = load_factors(w, up_rows, b, K, FORMS, I)
            up = _multiply_panel(up, w, halves, bytes, words, x, tokens, live, up_rows, b, K, FORMS, I, EVEN_K, NATIVE)
    return acc, up


@jit
def panel_sums(
    x, w, halves, bytes, tokens, live, rn, tile, first, last, K, N, N_OUT, FORMS: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of weight rows rn, which are row tile `tile`, with x[tokens] over the K blocks [first, last).

    If the weight has several formats, each tile lies in one of them, and GATED is not possible.
    """
    acc = tl.zeros((BN, BT), tl.float32)
    up = tl.zeros((BN, BT), tl.float32)
    if len(FORMS) == 1:
        acc, up = _panel_loop(acc, up, x, w, halves, bytes, tokens, live, rn, first, last, K, N, N_OUT,
                              FORMS, 0, GATED, EVEN_K, NATIVE)  # fmt: skip
    else:
        for i in tl.static_range(len(FORMS)):
            if (tile * BN >= FORMS[i][BEGIN]) & (tile * BN < FORMS[i][END]):
                acc, up = _panel_loop(acc, up, x, w, halves, bytes, tokens, live, rn - FORMS[i][BEGIN], first, last, K,
                                      FORMS[i][END] - FORMS[i][BEGIN], N_OUT, FORMS, i, False, EVEN_K, NATIVE)  # fmt: skip
            size = panels_words(FORMS[i][END] - FORMS[i][BEGIN], K, FORMS, i)
            w += size
            halves += size * 2
            bytes += size * 4
    return acc, up


@jit
def panel_rows_kernel(
    ids, w, halves, bytes, out, M, K, COUNT, FIRST_ROW, FORMS: tl.constexpr, I: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a weight, out[i] = W[ids[i]], or if not LISTED all rows. It does those of format I, whose COUNT rows begin at
    row FIRST_ROW and at w. Grid (tiles of BLOCK_ROWS rows, K blocks)."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b = tl.program_id(1)
    rows = (tl.load(ids + i, mask=i < M, other=0).to(tl.int32) if LISTED else i) - FIRST_ROW
    ok = (i < M) & (rows >= 0) & (rows < COUNT)
    rows = tl.where(ok, rows, 0)
    words = load_factors(w, rows, b, K, FORMS, I)
    codes = load_codes(w, halves, bytes, rows, b, K, FORMS, I)
    for p in tl.static_range(8):
        scale, low = group_factors(words, p * 16 // FORMS[I][GROUP], FORMS, I)
        k = b * 128 + p * 16 + tl.arange(0, 16)
        value = plane_values(codes, scale, low, p, FORMS, I)
        at = out + i.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=ok[:, None] & (k < K)[None, :])


def views(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words as kernels take them: as they are, as int16, and as uint8."""
    return words, words.view(torch.int16), words.view(torch.uint8)


def triton_rows(words: Tensor, forms: Forms, n: int, k: int, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`matrix` [n, k] in `dtype` by our kernel, or the rows ids [M] of it."""
    count = n if ids is None else len(ids)
    out = words.new_empty(count, k, dtype=dtype)
    facts, at, first = kernel_forms(forms), 0, 0
    block = 32 if ids is None else 4
    for i, (rows, *numbers) in enumerate(forms):
        panel_rows_kernel[triton.cdiv(count, block), triton.cdiv(k, 128)](
            words if ids is None else ids, *views(words[at:]), out, count, k, rows, first, FORMS=facts, I=i,
            LISTED=ids is not None, BLOCK_ROWS=block, num_warps=4 if ids is None else 1,
        )  # fmt: skip
        at += panels_bytes(Format.from_numbers(numbers), rows, k) // 4
        first += rows
    return out
