"""Weights as a file has quantized them (`kernels.formats`), in panels for the Triton kernels.

A panel holds 32 rows and one or two K blocks of 128 columns: two if a scale belongs to 256 columns or codes have a
single high bit. K is padded with scales of zero. In a block a row has 16 slots: slot i has the codes of columns i, i + 16
and so on up to i + 112, the first one in the lowest bits. The slots of the low bits of all rows come first, then those of
the high bits, which are as far apart as the low ones so that one shift serves several (`_places`). Where a code has 8
bits, its slot is two words, each for 64 columns.

Behind the codes of a block lie words, one of each kind for every row: small scales plus 128 and small mins as bytes (two
nibbles of one byte where a code has 2 bits), and scales in fp16, as pairs of scale and min where there are minima.

At the end of a panel of two blocks lie single high bits, in slots of 16 bits whose upper half is the second block's, and
pairs of scale and min (or 0) where a scale belongs to 256 columns.

The panels of 32 rows lie behind one another. Then come those of the next 32 rows, and behind the last ones the rows of
the next format. A weight has a tuple of formats: of each the number of its rows, and `Format.numbers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import constexpr, dot, jit, tl, triton
from kernels.formats import FP8_FACTORS, Blocks, Format, Part

ROWS = 32  # of a panel
NUMBERS = 10  # of a format, with its rows
Forms = tuple[tuple[int, ...], ...]
# Where a fact lies in a format as `kernel_forms` gives it to kernels. FIRST and LAST are the halves of a table.
FP8 = constexpr(FP8_FACTORS)
BEGIN, END, LOW, HIGH, GROUP, UNIT, OFFSET, NESTED, MINIMA, FIRST, LAST = map(constexpr, range(11))
# Words of a K block; of a row with bytes of small scales; with bytes of small mins; with fp16 values of a block. Columns
# and words of a panel.
BLOCK, SMALL, SMALL_MINS, PAIRS, COLUMNS, SIZE = map(constexpr, range(11, 17))


def _layout(form: Format) -> tuple[int, ...]:
    """BLOCK, SMALL, SMALL_MINS, PAIRS, COLUMNS and SIZE of a format."""
    small = 32 // form.group if form.nested else 0
    small_mins = small if form.minima and not form.nibbles else 0
    wide = form.unit > 128 or form.nested == FP8_FACTORS
    pairs = 0 if wide else 4 if form.minima else 2
    single = form.high == 1
    block = 128 * (form.low + form.high * (not single)) + ROWS * (small + small_mins + pairs)
    count = 2 if wide or single else 1
    return block, small, small_mins, pairs, 128 * count, count * block + 256 * single + ROWS * wide


def panel_shape(form: Format) -> tuple[int, ...]:
    """The columns and the int32 words of a panel."""
    return _layout(form)[4:]


def panels_bytes(form: Format, n: int, k: int) -> int:
    """The bytes of n rows of k columns."""
    columns, words = panel_shape(form)
    return 4 * -(-n // ROWS) * -(-k // columns) * words


def fits_panels(shapes: Sequence[tuple[int, int]], forms: Sequence[Format]) -> bool:
    """Whether matrices of these shapes and formats can be rows of one weight: none but the last ends inside a panel."""
    whole = all(n % ROWS == 0 for n, _ in shapes[:-1])
    return whole and all(k % form.unit == 0 for (_, k), form in zip(shapes, forms, strict=True))


def kernel_forms(forms: Forms) -> Forms:
    """A weight's formats as kernels take them. A single one has no rows, so that their number chooses no instructions."""
    found, begin = [], 0
    for rows, *numbers in forms:
        end = begin + rows if len(forms) > 1 else 0
        found.append((begin, end, *numbers, *_layout(Format.from_numbers(numbers))))
        begin = end
    return tuple(found)


# ---- packing ---------------------------------------------------------------------------------------------------


def to_panels(piece: Blocks, form: Format) -> Tensor:
    """Some rows in panels, int32 [rows / 32 rounded up, K / columns of a panel, words]."""
    n, k = piece.codes.shape
    columns, _ = panel_shape(form)
    fp8 = form.nested == FP8_FACTORS
    more = -n % ROWS, -k % columns

    def rows(values: Tensor, per: int) -> Tensor:
        """Values of `per` columns each [n, k / per] -> [panels of rows, blocks, 32, values of a block]."""
        padded = F.pad(values, (0, more[1] // per, 0, more[0]))
        return padded.view(-1, ROWS, (k + more[1]) // columns, columns // per).transpose(1, 2)

    def blocks(values: Tensor) -> Tensor:
        return values.unflatten(-1, (columns // 128, -1)).transpose(-3, -2)  # [..., K blocks of a panel, 32, values]

    codes = blocks(rows(piece.codes, 1))
    parts = [_slots(codes & (2**form.low - 1), form.low, form.low)]
    high = codes >> form.low
    if form.high > 1:
        parts.append(_slots(high, form.high, form.low))
    if form.nested:
        small, mins = piece.sub_scales.view(torch.uint8), piece.sub_mins
        small = small | mins << 4 if form.nibbles and form.minima else small ^ 128 * (not fp8)
        for values in (small, mins) if form.minima and not form.nibbles else (small,):
            parts.append(_words_of(blocks(rows(values, form.group))))
    # above FP8_FACTORS one scale, of a whole row, stands in every panel
    large = [rows(piece.scales.expand(-1, -(-k // columns)), columns) if fp8 else rows(piece.scales, form.unit)]
    if (form.minima or form.unit > 128) and not fp8:
        large.append(rows(piece.mins, form.unit) if form.minima else torch.zeros_like(large[0]))
    pairs, tail = torch.stack(large, -1).flatten(-2), []
    if form.high == 1:
        first, second = _packed(high, 1, form.low).unbind(-2)
        tail.append((first | second << 8).to(torch.int16).view(torch.int32))
    if form.unit > 128 or fp8:
        tail.append(_words_of(pairs))
    else:
        parts.append(_words_of(blocks(pairs)))
    return torch.cat((torch.cat(parts, -1).flatten(-2), *tail), -1)


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


def _places(bits: int, stride: int, planes: int) -> list[int]:
    """The lowest bit of each plane of 16 columns in a slot: `stride` apart, and then again in the bits between."""
    per = max(1, 8 * bits // stride)
    return [plane % per * stride + plane // per * bits for plane in range(planes)]


def _packed(codes: Tensor, bits: int, stride: int) -> Tensor:
    """Codes [..., 32, 128] -> the numbers in their slots [..., 512 or more]."""
    planes = codes.unflatten(-1, (-1, min(8, 32 // bits), 16)).to(torch.int32)  # [..., 32, words of a slot, planes, 16]
    packed = torch.zeros_like(planes[..., 0, :])
    for plane, place in enumerate(_places(bits, stride, planes.shape[-2])):
        packed |= planes[..., plane, :] << place
    return packed.transpose(-3, -2).flatten(-3)


def _slots(codes: Tensor, bits: int, stride: int) -> Tensor:
    """Codes [..., 32, 128] -> the words of their slots. Those of 2 bits a code are half a word."""
    packed = _packed(codes, bits, stride)
    return packed.to(torch.int16).view(torch.int32) if bits == 2 else packed


def _words_of(values: Tensor) -> Tensor:
    """Values [..., 32, bytes of whole words] -> words, those of one kind for all rows behind one another."""
    return values.contiguous().view(torch.int32).transpose(-2, -1).flatten(-2)


def from_panels(words: Tensor, form: Format, n: int, k: int) -> Blocks:
    """The inverse of `to_panels`: n rows of k columns of words as it returns them."""
    block, small, small_mins, pairs, columns, _ = _layout(form)
    count = columns // 128
    blocks = words[..., : count * block].unflatten(-1, (count, block))  # [rows / 32, panels, blocks, words]
    tail = words[:, :, None, count * block :]

    def rows(values: Tensor) -> Tensor:
        """[rows / 32, panels, blocks, 32, values] -> [rows, values of a row]"""
        return values.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:n]

    def unpacked(slots: Tensor, bits: int) -> Tensor:
        """The inverse of `_packed`, as rows."""
        places = torch.tensor(_places(bits, form.low, min(8, 32 // bits)), dtype=torch.int32, device=words.device)
        planes = slots.unflatten(-1, (-1, ROWS, 16)).transpose(-3, -2)[..., None, :] >> places[:, None]
        return rows((planes & (2**bits - 1)).flatten(-3))[:, :k].to(torch.uint8)

    def slots(at: int, bits: int) -> Tensor:
        part = blocks[..., at : at + 128 * bits].contiguous()
        return part.view(torch.int16).to(torch.int32) if bits == 2 else part

    def kind(part: Tensor, at: int, each: int, dtype: torch.dtype) -> Tensor:
        own = part[..., at : at + ROWS * each].unflatten(-1, (each, ROWS)).transpose(-2, -1)
        return rows(own.contiguous().view(dtype))

    codes, at = unpacked(slots(0, form.low), form.low), 128 * form.low
    if form.high == 1:
        both = tail[..., :256].contiguous().view(torch.int16).to(torch.int32)
        codes |= unpacked(torch.cat((both, both >> 8), 2), 1) << form.low
    elif form.high:
        codes |= unpacked(slots(at, form.high), form.high) << form.low
        at += 128 * form.high
    sub = sub_mins = None
    if form.nested:
        groups = k // form.group
        sub = kind(blocks, at, small, torch.uint8)[:, :groups]
        if small_mins:
            sub_mins = kind(blocks, at + ROWS * small, small_mins, torch.uint8)[:, :groups]
        if form.nested == FP8_FACTORS:
            return Blocks(codes, kind(tail, 0, 1, torch.float32)[:, :1], None, sub)
        sub, sub_mins = (sub & 15, sub >> 4) if form.nibbles and form.minima else (sub ^ 128, sub_mins)
        sub = sub.view(torch.int8)
    at += ROWS * (small + small_mins)
    large = kind(blocks, at, pairs, torch.float16) if pairs else kind(tail, 256 * (form.high == 1), 1, torch.float16)
    each = 2 if form.minima or not pairs else 1  # where a scale of 256 columns has no min, a zero stands in its place
    scales, *mins = (large[:, i : k // form.unit * each : each] for i in range(each))
    return Blocks(codes, scales, mins[0] if form.minima else None, sub, sub_mins)


def matrix(words: Tensor, forms: Forms, n: int, k: int) -> Tensor:
    """The values [n, k] of a weight in float32 (`Blocks.floats`), from its words."""
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
    return tl.cdiv(rows, 32) * tl.cdiv(K, FORMS[I][COLUMNS]) * FORMS[I][SIZE]


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
def _panel_at(rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The first word of the panel that K block b of these rows lies in, and of the block."""
    COUNT: tl.constexpr = FORMS[I][COLUMNS] // 128
    panel = (rows // 32).to(tl.int64) * (tl.cdiv(K, FORMS[I][COLUMNS]) * FORMS[I][SIZE]) + b // COUNT * FORMS[I][SIZE]
    return panel, panel + b % COUNT * FORMS[I][BLOCK]


@jit
def _word(w, at, i: tl.constexpr, USED: tl.constexpr):
    """Word i of every row, or a placeholder."""
    return tl.load(w + at + 32 * i) if USED else at.to(tl.int32)


@jit
def load_factors(w, rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The words with the factors of these rows in K block b: 4 of fp16 values, 2 of small scales, 2 of small mins."""
    panel, at = _panel_at(rows, b, K, FORMS, I)
    at += rows % 32
    WIDE: tl.constexpr = FORMS[I][UNIT] > 128 or FORMS[I][NESTED] == FP8
    PAIR: tl.constexpr = FORMS[I][PAIRS]
    S: tl.constexpr = FORMS[I][SMALL]
    M: tl.constexpr = FORMS[I][SMALL_MINS]
    pair = panel + rows % 32 + (FORMS[I][SIZE] - 32) if WIDE else at + (FORMS[I][BLOCK] - 32 * PAIR)
    at += FORMS[I][BLOCK] - 32 * (PAIR + S + M)
    return (
        _word(w, pair, 0, True), _word(w, pair, 1, PAIR > 1), _word(w, pair, 2, PAIR > 2), _word(w, pair, 3, PAIR > 3),
        _word(w, at, 0, S > 0), _word(w, at, 1, S > 1), _word(w, at, S, M > 0), _word(w, at, S + 1, M > 1),
    )  # fmt: skip


@jit
def load_codes(w, halves, rows, b, K, FORMS: tl.constexpr, I: tl.constexpr):
    """The slots of these rows in K block b: of the low bits, of columns from 64 on if these are apart, of the high bits.

    halves: the words w as int16.
    """
    L: tl.constexpr = FORMS[I][LOW]
    H: tl.constexpr = FORMS[I][HIGH]
    panel, at = _panel_at(rows, b, K, FORMS, I)
    at = at[:, None]
    slot = (rows % 32 * 16)[:, None] + tl.arange(0, 16)[None, :]
    if L == 2:
        low = tl.load(halves + at * 2 + slot, eviction_policy="evict_first")
    else:
        low = tl.load(w + at + slot, eviction_policy="evict_first")
    far = tl.load(w + at + 512 + slot, eviction_policy="evict_first") if L == 8 else low
    if H == 2:
        high = tl.load(halves + (at + 128 * L) * 2 + slot, eviction_policy="evict_first").to(tl.int32)
    elif H == 1:  # of two blocks
        # For this shift Triton lets decoded weights go through shared memory. Eight bits a slot would do so, too.
        high = tl.load(halves + (panel[:, None] + 2 * FORMS[I][BLOCK]) * 2 + slot).to(tl.int32) >> b % 2 * 8
    else:
        high = low.to(tl.int32)
    return low.to(tl.int32), far, high


@jit
def _half(words, i: tl.constexpr):
    """fp16 value i of pairs in words, in float32."""
    word = words[i // 2]
    return ((word >> 16 * (i % 2)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _number(word, mask: tl.constexpr, zero: tl.constexpr):
    """The bits of a word that the mask names, less than 2^23, as a float with `zero` taken off. 2^23 with them as its
    last bits is a float, and quicker to make than by a conversion."""
    return ((word & mask) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@jit
def group_factors(words, g: tl.constexpr, FORMS: tl.constexpr, I: tl.constexpr):
    """(scale, what is added) of the rows in group g of a block, in float32. Both products are exact, but above
    FP8_FACTORS, where a scale has all bits of float32."""
    WIDE: tl.constexpr = FORMS[I][UNIT] > 128
    M: tl.constexpr = FORMS[I][MINIMA]
    if FORMS[I][NESTED] == FP8:  # seven bits further up they are those of float16
        fp8 = ((words[4 + g // 4] >> 8 * (g % 4)) & 255) << 7
        # 2^15: codes are decoded as 2^-14 of what they stand for, and the table has twice that
        factor = fp8.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        whole = words[0].to(tl.float32, bitcast=True) * 32768.0 * factor
        return whole, whole
    u: tl.constexpr = 0 if WIDE else g
    scale = _half(words, 2 * u if M or WIDE else u)
    low = _half(words, 2 * u + 1) if M else scale
    if FORMS[I][NESTED]:
        at: tl.constexpr = 8 * (g % 4)
        small = words[4 + g // 4] >> at
        if M and FORMS[I][SMALL_MINS] == 0:
            scale *= _number(small, 15, 0)
            low *= _number(small >> 4, 15, 0)
        else:
            scale *= _number(small, 255, 128)
            if M:
                low *= _number(words[6 + g // 4] >> at, 255, 0)
    return scale, low


@jit
def plane_values(codes, scale, low, p: tl.constexpr, FORMS: tl.constexpr, I: tl.constexpr):
    """The values of columns 16 p to 16 p + 15 of a block, in float32. Only adding a min rounds them."""
    L: tl.constexpr = FORMS[I][LOW]
    H: tl.constexpr = FORMS[I][HIGH]
    bit: tl.constexpr = p * L % 32 % 16  # Codes stay where they are in a half of a word, and the scale makes up for it.
    word = codes[1] if p * L >= 32 else codes[0]
    word = word >> 16 if p * L % 32 >= 16 else word
    if FORMS[I][NESTED] == FP8:  # a sign, two bits of the exponent and one more are, moved up, such a number in float16
        bits = ((word >> bit) & 7) << 9 | ((word >> bit) & 8) << 12
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale[:, None]
    elif FORMS[I][FIRST] != 0 or FORMS[I][LAST] != 0:
        code = (word >> bit) & 15
        first = tl.full(code.shape, FORMS[I][FIRST], tl.int64)
        entries = tl.where(code < 8, first, tl.full(code.shape, FORMS[I][LAST], tl.int64))
        value = _number((entries >> (code & 7) * 8).to(tl.int32), 255, FORMS[I][OFFSET]) * scale[:, None]
    else:
        word = word & ((2**L - 1) << bit)
        if H > 0:  # as `_places` has it
            PER: tl.constexpr = 8 * H // L
            far: tl.constexpr = bit + L - (p % PER * L + p // PER * H)
            word |= (codes[2] << far if far > 0 else codes[2] >> -far) & ((2**H - 1) << bit + L)
        value = _number(word, (2 ** (L + H) - 1) << bit, FORMS[I][OFFSET] * 2**bit) * (scale * (1 / 2**bit))[:, None]
    return value + low[:, None] if FORMS[I][MINIMA] else value


@jit
def _panel_loop(
    acc, x, w, halves, tokens, live, rn, first, last, K, COUNT, FORMS: tl.constexpr, I: tl.constexpr,
    EVEN_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc[BN, BT] + W[rn] @ x[tokens]^T over the K blocks [first, last), for rows rn of the COUNT rows of format I."""
    DT: tl.constexpr = x.dtype.element_ty
    rows = tl.minimum(rn, COUNT - 1)  # rows past the end are read as the last row, and their products are not stored
    for b in range(first, last):
        words = load_factors(w, rows, b, K, FORMS, I)
        codes = load_codes(w, halves, rows, b, K, FORMS, I)
        for p in tl.static_range(8):
            if p * 16 % FORMS[I][GROUP] == 0:
                scale, low = group_factors(words, p * 16 // FORMS[I][GROUP], FORMS, I)
            k = b * 128 + p * 16 + tl.arange(0, 16)
            mask = live[None, :] if EVEN_K else live[None, :] & (k < K)[:, None]
            xp = tl.load(x + tokens[None, :] * K + k[:, None], mask=mask, other=0, eviction_policy="evict_last")
            acc = dot(plane_values(codes, scale, low, p, FORMS, I).to(DT), xp, acc, NATIVE)
    return acc


@jit
def panel_sums(
    x, w, halves, tokens, live, rn, tile, first, last, K, N, FORMS: tl.constexpr, EVEN_K: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of weight rows rn, which are row tile `tile`, with x[tokens] over the K blocks [first, last).

    If the weight has several formats, each tile lies in one of them.
    """
    ROWS: tl.constexpr = rn.shape[0]
    acc = tl.zeros((ROWS, tokens.shape[0]), tl.float32)
    if len(FORMS) == 1:
        acc = _panel_loop(acc, x, w, halves, tokens, live, rn, first, last, K, N, FORMS, 0, EVEN_K, NATIVE)
    else:
        for i in tl.static_range(len(FORMS)):
            if (tile * ROWS >= FORMS[i][BEGIN]) & (tile * ROWS < FORMS[i][END]):
                count = FORMS[i][END] - FORMS[i][BEGIN]
                acc = _panel_loop(acc, x, w, halves, tokens, live, rn - FORMS[i][BEGIN], first, last, K, count,
                                  FORMS, i, EVEN_K, NATIVE)  # fmt: skip
            size = panels_words(FORMS[i][END] - FORMS[i][BEGIN], K, FORMS, i)
            w += size
            halves += size * 2
    return acc


@jit
def panel_rows_kernel(
    ids, w, halves, out, M, K, COUNT, FIRST_ROW, FORMS: tl.constexpr, I: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Rows of a weight, out[i] = W[ids[i]]. It does those of format I, whose COUNT rows begin at row FIRST_ROW and at w.
    Grid (tiles of BLOCK_ROWS rows, K blocks)."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b = tl.program_id(1)
    rows = tl.load(ids + i, mask=i < M, other=0).to(tl.int32) - FIRST_ROW
    ok = (i < M) & (rows >= 0) & (rows < COUNT)
    rows = tl.where(ok, rows, 0)
    words = load_factors(w, rows, b, K, FORMS, I)
    codes = load_codes(w, halves, rows, b, K, FORMS, I)
    for p in tl.static_range(8):
        scale, low = group_factors(words, p * 16 // FORMS[I][GROUP], FORMS, I)
        k = b * 128 + p * 16 + tl.arange(0, 16)
        value = plane_values(codes, scale, low, p, FORMS, I)
        at = out + i.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=ok[:, None] & (k < K)[None, :])


def triton_rows(out: Tensor, words: Tensor, forms: Forms, ids: Tensor) -> None:
    """Write the rows ids [M] of `matrix` in the dtype of `out` [M, k] by our kernel."""
    (count, k), facts, at, first = out.shape, kernel_forms(forms), 0, 0
    for i, (rows, *numbers) in enumerate(forms):
        own = words[at:]
        panel_rows_kernel[triton.cdiv(count, 4), triton.cdiv(k, 128)](
            ids, own, own.view(torch.int16), out, count, k, rows, first, FORMS=facts, I=i, BLOCK_ROWS=4, num_warps=1
        )
        at += panels_bytes(Format.from_numbers(numbers), rows, k) // 4
        first += rows
