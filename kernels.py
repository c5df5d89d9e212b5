"""Every operation with a hand-written kernel, next to its plain-PyTorch reference of the same signature.

The reference is also the CPU path. What may differ by backend is a torch operator (`torch.ops.eaglet.*`), opaque to
torch.compile, that asks the active `KernelBackend` when it runs; packed weights choose theirs when they are packed.
Source of layouts and limits: performance.md sections 3, 5, 6 and 7. Bits of a row never depend on other rows or on M.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# fmt: off
try:  # machines without Triton still run every reference
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

_jit = triton.jit if triton else (lambda function: function)
_jit_any_m = triton.jit(do_not_specialize=["M"]) if triton else _jit  # one binary per token tile, also for M = 1
_constexpr = tl.constexpr if triton else str

OPERATIONS = ("packed_linear", "packed_topk", "packed_experts", "tree_attention", "rms_norm", "rope_write_kv")


@dataclass(frozen=True)
class KernelBackend:
    """Which implementation every operation uses on one device, decided once on the host.

    mode 'auto': Triton on CUDA, reference elsewhere. 'triton' / 'reference': exactly that, or ValueError naming why not.
    `table` maps operation -> (backend, reason). Use `with backend.active():` around packing and steps: operators read it
    when they run (or are captured); outside any such block 'auto' for the tensor's device holds. A kernel that cannot do
    a call (float64, say) is a ValueError under 'triton'; under 'auto' the reference does it and `declined` says why.
    """

    mode: str = "auto"
    device_type: str = "cpu"
    configs: Mapping[str, LinearConfig] = field(compare=False, default_factory=dict)  # tuned, for packing
    table: dict[str, tuple[str, str]] = field(init=False, compare=False)
    declined: dict[str, str] = field(init=False, compare=False, default_factory=dict)

    def __post_init__(self):
        if self.mode not in ("auto", "triton", "reference"):
            raise ValueError(f"kernels: unknown backend '{self.mode}', use one of auto, triton, reference")
        choice = ("triton", "asked for" if self.mode == "triton" else "auto: the device is CUDA")
        if self.mode == "reference":
            choice = ("reference", "asked for")
        elif self.mode == "auto" and self.device_type != "cuda":
            choice = ("reference", f"auto: '{self.device_type}' has no Triton target")
        elif triton is None:
            raise ValueError("kernels: triton is not installed (pip install triton); or use --kernels reference")
        elif self.device_type != "cuda" and not _INTERPRETED:
            raise ValueError(f"kernels: Triton runs on '{self.device_type}' only under TRITON_INTERPRET=1, set before "
                             "starting; or use --kernels reference")
        object.__setattr__(self, "table", dict.fromkeys(OPERATIONS, choice))

    @contextlib.contextmanager
    def active(self) -> Iterator[KernelBackend]:
        """Operators called inside the block use this backend."""
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    def describe(self) -> dict[str, str]:
        """Operation -> its backend and why; one that declined calls so far says that too."""
        but = {name: f", reference where {why}" for name, why in self.declined.items()}
        return {name: f"{kind} ({why}){but.get(name, '')}" for name, (kind, why) in self.table.items()}

    def report(self) -> str:
        """`describe` in one line, operations of the same backend together."""
        names: dict[str, list[str]] = {}
        for name, text in self.describe().items():
            names.setdefault(text, []).append(name)
        return "; ".join(text + f": {', '.join(which)}" * (len(names) > 1) for text, which in names.items())


_ACTIVE: contextvars.ContextVar[KernelBackend | None] = contextvars.ContextVar("eaglet_kernels", default=None)


def _use_triton(operation: str, x: Tensor, problem: str = "") -> bool:
    """Whether `operation` runs its kernel on x. problem: why it cannot, to be declined or refused (class docstring)."""
    backend = _ACTIVE.get()
    if backend is None:
        if triton is None or not x.is_cuda:
            return False
        backend = KernelBackend("auto", "cuda")
    if backend.table[operation][0] == "reference":
        return False
    if x.dtype == torch.float64:
        problem = "the dtype is float64"
    elif not x.is_cuda and not _INTERPRETED:
        problem = f"tensors are on '{x.device.type}'"
    if problem and backend.mode == "triton":
        raise ValueError(f"kernels: {operation} has no Triton kernel where {problem}; use --kernels auto or reference")
    if problem:
        backend.declined[operation] = problem
    return not problem


def _plain(x: Tensor, weight: Tensor | None) -> bool:
    """Whether a call goes past the operators: on CPU, where plain code fuses, and for gradients, which they lack."""
    trained = x.requires_grad or (weight is not None and weight.requires_grad)
    return (trained and torch.is_grad_enabled()) or not (x.is_cuda or _INTERPRETED)


def _on_device(x: Tensor) -> bool:
    """Whether kernels use PTX and native 16-bit dots; False selects the twins (interpreter, fp32 activations)."""
    return not _INTERPRETED and x.dtype in (torch.float16, torch.bfloat16)


# ---------------------------------------------------------------------------------------------- KV cache


KV_SCALE = 4  # bytes: an int8 row is hd codes and then their float32 scale, so that moving a row moves its scale


def quantize_rows(x: Tensor) -> Tensor:
    """Keys or values [..., hd] -> int8 rows [..., hd + 4], each with a scale of its own: largest magnitude / 127. A row
    depends on itself alone, so speculative and plain decoding store the same; one with a NaN or infinity reads as NaN."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / torch.where(scale == 0, 1, scale) + 0.5).floor().nan_to_num(0).to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), -1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantize_rows`: int8 [..., hd + 4] -> [..., hd] in `dtype`, computed in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = rows[..., -KV_SCALE:].contiguous().view(torch.float32)
    return (rows[..., :-KV_SCALE].to(wide) * scale.to(wide)).to(dtype)


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the rows of one forward into one layer's cache, in place.

    kv_layer [2,B,Hkv,S,hd], or int8 [...,hd+4]; k, v [B,Hkv,T,hd], cast to the cache dtype or quantized;
    slots [B,T] int64 in 0..S-1 (the caller clamps to the trash row S-1; only that row
    may occur twice). No host sync, traceable.
    """
    rows = torch.stack((k, v))
    rows = quantize_rows(rows) if kv_layer.dtype == torch.int8 else rows.to(kv_layer.dtype)
    if slots.shape[0] == 1:
        kv_layer.index_copy_(3, slots[0], rows)
    else:
        kv_layer.scatter_(3, slots[None, :, None, :, None].expand(rows.shape), rows)


def commit_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Move the accepted path's rows to their final slots in all layers, in place: gather everything, then scatter.

    kv [L,2,B,Hkv,S,hd]; source, target [B,P] int64 slots, fixed P (= D+1). Rows past the accepted count should name the
    same slot in both, or the trash row as target. Overlapping source and target ranges are safe. No host sync.
    """
    layers, _, batch, heads, _, dim = kv.shape
    if batch == 1:
        kv.index_copy_(4, target[0], kv.index_select(4, source[0]))
        return
    shape = (layers, 2, batch, heads, source.shape[1], dim)
    rows = kv.gather(4, source[None, None, :, None, :, None].expand(shape))
    kv.scatter_(4, target[None, None, :, None, :, None].expand(shape), rows)


# ---------------------------------------------------------------------------------------------- Triton: linears
# Layout "planes": 128 k values of one output row are KP = 16 (int4) or 32 (int8) int32 words; word i holds
# k = i, i + KP, i + 2 KP, ..., lowest bits first, so one load feeds every tl.dot of the block from registers. Codes are
# unsigned with the zero point in the middle (8 or 128).


def _ptx(bits: int, bf16: bool) -> str:
    """PTX for `inline_asm_elementwise(pack=2)`: two words in, 32 / bits registers of two fp16 or bf16 values out.

    The code is ORed into the mantissa of 1024.0 (fp16) or 128.0 (bf16), then the offset is subtracted. fp16 reads odd
    nibbles in place, as 16 q, and scales by 1/16. bf16 has 7 mantissa bits: the top bit of a byte becomes a 128 or 256.
    """
    planes = 32 // bits
    constants = (((0x64086408, 0x2C002C00, 0xD480D480), (0xC308C308, 0x3F803F80, 0x43004300)),
                 ((0x64806480, 0, 0), (0xBF80BF80, 0x43804380, 0x43004300)))[bits == 8][bf16]
    body = [f"mov.b32 c{i + 1}, 0x{c:08x};" for i, c in enumerate(constants) if c]
    body += [f"prmt.b32 {w}, ${planes}, ${planes + 1}, {pick};" for w, pick in (("lo", "0x5410"), ("hi", "0x7632"))]
    for plane in range(planes):
        word, j, out = ("lo", "hi")[2 * plane // planes], plane % (planes // 2), f"${plane}"
        in_place = bits == 4 and not bf16 and j % 2 == 1
        shift = bits * (j - in_place)
        if shift and not in_place:
            body.append(f"shr.u32 s, {word}, {shift};")
        source = "s" if shift else word
        if bits == 4 and bf16:
            body.append(f"lop3.b32 t, {source}, 0x000f000f, c3, 0xEA; fma.rn.bf16x2 {out}, t, c2, c1;")
        elif bits == 8 and bf16:
            body.append(f"lop3.b32 t, {source}, 0x007f007f, c3, 0xEA; lop3.b32 u, {source}, 0x00800080, c2, 0x6A;")
            body.append(f"fma.rn.bf16x2 {out}, u, c1, t;")
        elif in_place:
            body.append(f"lop3.b32 t, {source}, 0x00f000f0, 0x64006400, 0xEA; fma.rn.f16x2 {out}, t, c2, c3;")
        else:
            mask = "0x000f000f" if bits == 4 else "0x00ff00ff"
            body.append(f"lop3.b32 t, {source}, {mask}, 0x64006400, 0xEA; sub.rn.f16x2 {out}, t, c1;")
    return "{ .reg .b32 lo, hi, s, t, u, c1, c2, c3; " + " ".join(body) + " }"


_PTX4_FP16, _PTX4_BF16 = _constexpr(_ptx(4, False)), _constexpr(_ptx(4, True))
_PTX8_FP16, _PTX8_BF16 = _constexpr(_ptx(8, False)), _constexpr(_ptx(8, True))
_REGS4, _REGS8 = _constexpr("=r," * 8 + "r,r"), _constexpr("=r," * 4 + "r,r")


@_jit
def _plane(w, p: tl.constexpr, BITS: tl.constexpr, DT: tl.constexpr):
    return (((w >> (BITS * p)) & (2**BITS - 1)) - 2 ** (BITS - 1)).to(tl.float32).to(DT)


@_jit
def _decode(w, BITS: tl.constexpr, DT: tl.constexpr, DEVICE: tl.constexpr):
    """int32 words -> 32 / BITS planes of centred codes in DT. Without DEVICE: the twin that the interpreter can run."""
    if not DEVICE:
        low = _plane(w, 0, BITS, DT), _plane(w, 1, BITS, DT), _plane(w, 2, BITS, DT), _plane(w, 3, BITS, DT)
        return low if BITS == 8 else low + (
            _plane(w, 4, BITS, DT), _plane(w, 5, BITS, DT), _plane(w, 6, BITS, DT), _plane(w, 7, BITS, DT))
    elif BITS == 4:
        if DT == tl.float16:
            return tl.inline_asm_elementwise(_PTX4_FP16, _REGS4, [w], (tl.float16,) * 8, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_PTX4_BF16, _REGS4, [w], (tl.bfloat16,) * 8, is_pure=True, pack=2)
    else:
        if DT == tl.float16:
            return tl.inline_asm_elementwise(_PTX8_FP16, _REGS8, [w], (tl.float16,) * 4, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_PTX8_BF16, _REGS8, [w], (tl.bfloat16,) * 4, is_pure=True, pack=2)


_INTERPRETED = triton is not None and not isinstance(_decode, triton.runtime.JITFunction)  # TRITON_INTERPRET=1


@_jit
def _dot(a, b, acc, DEVICE: tl.constexpr):
    """a @ b + acc in acc's dtype; off the device through fp32, as the interpreter's tl.dot misreads bfloat16."""
    if DEVICE:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        wide = tl.dot(a.to(tl.float32), b.to(tl.float32), acc.to(tl.float32), input_precision="ieee")
        return wide.to(acc.dtype)


@_jit
def _group_row(s, rn, group, K, N, GROUP: tl.constexpr):
    return tl.load(s + group * N + rn, mask=(rn < N) & (group * GROUP + 0 * rn < K), other=0)


@_jit
def _group_rows(s, rn, block, K, N, GROUP: tl.constexpr, USED: tl.constexpr):
    """The 1, 2 or 4 rows of `scales` (or `zeros`) for one K block, as four values, loaded one turn ahead of their use:
    2-byte loads cannot be asynchronous copies. Not USED: placeholders."""
    if USED:
        COUNT: tl.constexpr = 128 // GROUP
        a = _group_row(s, rn, block * COUNT, K, N, GROUP)
        b = _group_row(s, rn, block * COUNT + 1, K, N, GROUP) if COUNT > 1 else a
        c = _group_row(s, rn, block * COUNT + 2, K, N, GROUP) if COUNT > 2 else a
        d = _group_row(s, rn, block * COUNT + 3, K, N, GROUP) if COUNT > 2 else a
        return a, b, c, d
    else:
        return rn, rn, rn, rn


@_jit
def _multiply_block(acc, w, scales, zeros, x, rows, live, rn, k0, K, N, BITS: tl.constexpr, GROUP: tl.constexpr,
                    ZEROS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ACC: tl.constexpr,
                    DEVICE: tl.constexpr):
    """acc[BN, BT] += W[rn, k0 : k0 + 128] @ x[rows, k0 : k0 + 128]^T, weights as the A operand, tokens on N."""
    DT: tl.constexpr = x.dtype.element_ty
    PLANES: tl.constexpr = 32 // BITS if BITS < 16 else 1
    KP: tl.constexpr = 128 // PLANES
    kp = tl.arange(0, KP)
    wp = w + rn[:, None] * (K if BITS == 16 else tl.cdiv(K, 128) * KP) + (k0 // PLANES + kp)[None, :]
    if EVEN_N and (EVEN_K or BITS < 16):
        words = tl.load(wp, eviction_policy="evict_first")
    else:
        inside = (rn < N)[:, None] & (kp < (K - k0 if BITS == 16 else KP))[None, :]
        words = tl.load(wp, mask=inside, other=0, eviction_policy="evict_first")
    q = _decode(words, BITS, DT, DEVICE) if BITS < 16 else (words,)
    part = acc
    for p in tl.static_range(PLANES):
        k = k0 + p * KP + kp
        mask = live[None, :] if EVEN_K else live[None, :] & (k < K)[:, None]
        xp = tl.load(x + rows[None, :] * K + k[:, None], mask=mask, other=0, eviction_policy="evict_last")
        if BITS != 4:  # one scale per output row, applied at the end
            part = _dot(q[p], xp, part, DEVICE)
        else:
            if p * KP % GROUP == 0:
                part = tl.zeros(acc.shape, ACC)
            a = q[p]
            if ZEROS:  # exact: small integers
                zero = zeros[p * KP // GROUP].to(tl.float32) - 8
                a = a - zero.to(DT)[:, None] if DEVICE else (a.to(tl.float32) - zero[:, None]).to(DT)
            part = _dot(a, xp, part, DEVICE)
            if (p + 1) * KP % GROUP == 0:  # promote to fp32 once per group
                acc += part.to(tl.float32) * scales[p * KP // GROUP].to(tl.float32)[:, None]
    return acc if BITS == 4 else part


@_jit
def _accumulate(x, w, s, z, rows, live, rn, first, last, K, N, N_OUT, BN: tl.constexpr, BT: tl.constexpr,
                BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
                EVEN_N: tl.constexpr, ACC: tl.constexpr, DEVICE: tl.constexpr):
    """The main loop: K blocks [first, last) of weight rows rn (and, GATED, of rows rn + N_OUT)."""
    FOUR: tl.constexpr = BITS == 4
    acc = tl.zeros((BN, BT), tl.float32)
    up = tl.zeros((BN, BT), tl.float32)
    scales, zeros = _group_rows(s, rn, first, K, N, GROUP, FOUR), _group_rows(z, rn, first, K, N, GROUP, ZEROS)
    up_scales = _group_rows(s, rn + N_OUT, first, K, N, GROUP, FOUR and GATED)
    up_zeros = _group_rows(z, rn + N_OUT, first, K, N, GROUP, ZEROS and GATED)
    for b in range(first, last):
        scales_b, zeros_b, up_scales_b, up_zeros_b = scales, zeros, up_scales, up_zeros
        scales, zeros = _group_rows(s, rn, b + 1, K, N, GROUP, FOUR), _group_rows(z, rn, b + 1, K, N, GROUP, ZEROS)
        acc = _multiply_block(acc, w, scales_b, zeros_b, x, rows, live, rn, b * 128, K, N,
                              BITS, GROUP, ZEROS, EVEN_K, EVEN_N, ACC, DEVICE)
        if GATED:
            up_scales = _group_rows(s, rn + N_OUT, b + 1, K, N, GROUP, FOUR)
            up_zeros = _group_rows(z, rn + N_OUT, b + 1, K, N, GROUP, ZEROS)
            up = _multiply_block(up, w, up_scales_b, up_zeros_b, x, rows, live, rn + N_OUT, b * 128, K, N,
                                 BITS, GROUP, ZEROS, EVEN_K, EVEN_N, ACC, DEVICE)
    return acc, up


@_jit
def _finish(acc, up, s, bias, residual, out, rn, out_rows, live, N, N_OUT, BITS: tl.constexpr, BIAS: tl.constexpr,
            RESIDUAL: tl.constexpr, GATED: tl.constexpr):
    """Epilogue in fp32: output-channel scale, bias, SiLU(gate) * up, residual; then one rounding."""
    ok = rn < N_OUT
    if BITS == 8:
        acc *= tl.load(s + rn, mask=ok, other=0).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(s + N_OUT + rn, mask=ok, other=0).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias + rn, mask=ok, other=0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N_OUT + rn, mask=ok, other=0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * up
    at = out_rows[None, :] * N_OUT + rn[:, None]
    mask = live[None, :] & ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@_jit
def _finish_topk(acc, x, s, out, ids, tile, rn, rm, live, M, N, BITS: tl.constexpr, TOPK: tl.constexpr):
    """Epilogue of an LM head, for each token: the tile's TOPK best logits (rounded like stored ones; NaN is -inf; ties
    to the lower id), its maximum and sum of exp(logit - maximum) in out [tiles, M, TOPK + 2], ids [tiles, M, TOPK]."""
    ok = rn < N
    if BITS == 8:
        acc *= tl.load(s + rn, mask=ok, other=0).to(tl.float32)[:, None]
    acc = acc.to(x.dtype.element_ty).to(tl.float32)
    acc = tl.where(ok[:, None] & (acc == acc), acc, float("-inf"))
    row, top = tile * M + rm, tl.max(acc, 0)
    total = tl.sum(tl.exp(acc - tl.where(top == float("-inf"), 0.0, top)[None, :]), 0)
    tl.store(out + row * (TOPK + 2) + TOPK, top, mask=live)
    tl.store(out + row * (TOPK + 2) + TOPK + 1, total, mask=live)
    free = ok[:, None] & live[None, :]
    for i in range(TOPK):
        best = tl.max(tl.where(free, acc, float("-inf")), 0)
        which = tl.min(tl.where(free & (acc == best[None, :]), rn[:, None], 2147483647), 0)
        tl.store(out + row * (TOPK + 2) + i, best, mask=live)
        tl.store(ids + row * TOPK + i, which, mask=live)
        free = free & (rn[:, None] != which[None, :])


@_jit_any_m
def _linear_kernel(x, w, s, z, bias, residual, out, ids, part, count, M, N, K, N_OUT, BITS: tl.constexpr,
                   GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
                   GATED: tl.constexpr, TOPK: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BN: tl.constexpr,
                   BT: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr, DEVICE: tl.constexpr):
    """out[M, N_OUT] (TOPK > 0: see `_finish_topk`). Grid (token tiles, row tiles, SPLIT): token tiles of one weight tile
    are neighbours in launch order, so its weights come from DRAM once. Partials are summed in split order by the CTA that
    arrives last; it also resets the counter, so the buffer is ready for the next launch (or graph replay)."""
    slab, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rt, rn = tl.arange(0, BT), tile * BN + tl.arange(0, BN)
    rm = slab * BT + rt
    live = rm < M
    blocks = tl.cdiv(K, 128)
    acc, up = _accumulate(x, w, s, z, rm, live, rn, blocks * split // SPLIT, blocks * (split + 1) // SPLIT, K, N, N_OUT,
                          BN, BT, BITS, GROUP, ZEROS, GATED, EVEN_K, EVEN_N, ACC, DEVICE)
    if SPLIT > 1:
        size = tl.num_programs(1) * BN * BT
        step = size * 2 if GATED else size
        at = slab * SPLIT * step + rn[:, None] * BT + rt[None, :]
        tl.store(part + split * step + at, acc)
        if GATED:
            tl.store(part + split * step + size + at, up)
        tl.debug_barrier()
        count += slab * tl.num_programs(1) + tile
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        acc = tl.zeros((BN, BT), tl.float32)
        up = tl.zeros((BN, BT), tl.float32)
        for j in range(SPLIT):
            acc += tl.load(part + j * step + at, cache_modifier=".cg")
            if GATED:
                up += tl.load(part + j * step + size + at, cache_modifier=".cg")
        tl.store(count, 0)
    if TOPK > 0:
        _finish_topk(acc, x, s, out, ids, tile, rn, rm, live, M, N, BITS, TOPK)
    else:
        _finish(acc, up, s, bias, residual, out, rn, rm, live, N, N_OUT, BITS, BIAS, RESIDUAL, GATED)


@_jit
def _expert_kernel(x, w, s, z, out, pairs, offsets, N, K, N_OUT, DIV, BITS: tl.constexpr, GROUP: tl.constexpr,
                   ZEROS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BN: tl.constexpr,
                   BT: tl.constexpr, ACC: tl.constexpr, DEVICE: tl.constexpr):
    """Grouped GEMM. Grid (token tiles, row tiles, experts); programs of idle experts leave at once. `pairs` lists
    (token, slot) pairs sorted by expert, expert e owns pairs[offsets[e] : offsets[e + 1]]; pair p reads row p // DIV.
    Token tiles of one weight tile are neighbours in launch order, so its weights come from DRAM once."""
    e = tl.program_id(2)
    first = tl.load(offsets + e) + tl.program_id(0) * BT
    end = tl.load(offsets + e + 1)
    if first < end:
        at = first + tl.arange(0, BT)
        live = at < end
        pair = tl.load(pairs + at, mask=live, other=0)
        rows = pair // DIV
        rn = tl.program_id(1) * BN + tl.arange(0, BN)
        words = K if BITS == 16 else tl.cdiv(K, 128) * (4 * BITS)
        w += e.to(tl.int64) * N * words
        s += e * N * (K // GROUP if BITS == 4 else 1)
        z += e * N * (K // GROUP if BITS == 4 else 1)
        acc, up = _accumulate(x, w, s, z, rows, live, rn, 0, tl.cdiv(K, 128), K, N, N_OUT,
                              BN, BT, BITS, GROUP, ZEROS, GATED, EVEN_K, EVEN_N, ACC, DEVICE)
        _finish(acc, up, s, s, s, out, rn, pair, live, N, N_OUT, BITS, False, False, GATED)


@_jit
def _dequantize_kernel(w, s, z, out, N, K, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BN: tl.constexpr,
                       DEVICE: tl.constexpr):
    """The bits of `dequantize` in one pass: out [N, K] from int4 or int8 words. Grid (row tiles, K blocks)."""
    DT: tl.constexpr = out.dtype.element_ty
    KP: tl.constexpr = 4 * BITS
    block, kp, rn = tl.program_id(1), tl.arange(0, KP), tl.program_id(0) * BN + tl.arange(0, BN)
    ok = (rn < N)[:, None]
    q = _decode(tl.load(w + rn[:, None] * (tl.cdiv(K, 128) * KP) + (block * KP + kp)[None, :], mask=ok, other=0),
                BITS, DT, DEVICE)
    for p in tl.static_range(32 // BITS):
        k = block * 128 + p * KP
        at = k // GROUP * N + rn if BITS == 4 else rn
        value, inside = q[p].to(tl.float32), (rn < N) & (k + 0 * rn < K)  # a group outside the matrix has no scale
        if ZEROS:
            value -= tl.load(z + at, mask=inside, other=8).to(tl.float32)[:, None] - 8
        value *= tl.load(s + at, mask=inside, other=0).to(tl.float32)[:, None]
        tl.store(out + rn[:, None] * K + (k + kp)[None, :], value.to(DT), mask=ok & (k + kp < K)[None, :])


# ---------------------------------------------------------------------------------------------- packed weights


class LinearConfig(NamedTuple):
    """Tiling of one (GPU, layer shape). Only `split_k` orders a row's sum; nothing depends on M."""

    block_n: int = 128
    split_k: int = 1
    warps: int = 4
    stages: int = 4
    accumulate: str = "float32"  # "float16": full-rate MMA on GeForce, promoted to fp32 once per group


def linear_config(n: int, k: int, bits: int, multiprocessors: int = 82) -> LinearConfig:
    """Default tiling: a pure function of shape and SM count. split_k fills whole waves of two CTAs per SM with at least
    four K blocks each (performance.md 3.3); fewest splits win ties."""
    block_n = 128 if bits < 16 and n >= 4096 else 64
    tiles, slots = -(-n // block_n), 2 * multiprocessors

    def use(split: int) -> float:
        return round(tiles * split / (-(-tiles * split // slots) * slots), 2)

    split_k = max(range(1, max(1, min(16, -(-k // 512))) + 1), key=lambda split: (use(split), -split))
    return LinearConfig(block_n, split_k, stages=4 if bits == 4 else 3)


def shape_key(n: int, k: int, bits: int) -> str:
    """A layer shape's name in `KernelBackend.configs`."""
    return f"{n}x{k} w{bits}"


def _launch(config, tokens: int, gated: bool, group: int = 0, zeros: bool = False) -> tuple[int, int, int, dict]:
    """(BN, BT, split_k, compiler options) of a launch; only split_k orders a sum. Gate-up halves BN: two tiles share a
    program. Zero points with fewer than 32 rows a warp send decoded weights through shared memory. At 32 tokens ptxas
    would rather spill than pass 128 registers; groups below 128 hold so many scales that more tokens spill at 255."""
    block_n, split, warps, stages = config
    block_n, small = max(block_n, 32 * warps if zeros else 16) // (1 + gated), 0 < group < 128
    tile = min(32 if small else TILE_M, max(16, triton.next_power_of_2(tokens)))
    options = dict(num_warps=warps, num_stages=stages, maxnreg=(255 if small else 168) if tile == 32 else None)
    return max(16, block_n), tile, split, options


def _arguments(x, scales, zeros, bits, group, n_out, gated, config, tokens, accumulate):
    """(grid, room for partial sums, scales and zeros or a placeholder, constants and options) of a launch on x [M, K];
    tokens: rows a tile may hold."""
    block_n, tile, split, options = _launch(config, tokens, gated, group, zeros is not None)
    grid = triton.cdiv(x.shape[0], tile), triton.cdiv(n_out, block_n), split
    partial = x.new_empty(math.prod(grid) * (1 + gated) * block_n * tile * (split > 1), dtype=torch.float32)
    return grid, partial, [x if t is None else t for t in (scales, zeros)], options | dict(
        BITS=bits, GROUP=group, ZEROS=zeros is not None, GATED=gated, EVEN_K=x.shape[1] % 128 == 0,
        EVEN_N=n_out % block_n == 0, BN=block_n, BT=tile, DEVICE=_on_device(x),
        ACC=tl.float16 if accumulate == "float16" and x.dtype == torch.float16 else tl.float32)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the layout its backend reads; made by `pack_*`, used by `packed_linear` and `packed_experts`.

    layout 'planes' (Triton), 'plain' (as stored), 'dense' (dequantized once), 'cpu' (torch's int4pack). Leading
    dimensions of `weight` before [N, ...] are experts. n, k: logical out and in features.
    """

    layout: str
    bits: int
    group_size: int
    n: int
    k: int
    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    perm: Tensor | None = None
    counters: Tensor | None = None
    config: LinearConfig = LinearConfig()


def _unpack_nibbles(qweight: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K]: byte j holds k = 2j in its low nibble."""
    return torch.stack((qweight & 15, qweight >> 4), -1).flatten(-2)


def _to_planes(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [..., K] -> int32 words [..., ceil(K/128) * 4 bits] in the plane layout, padded with zero points."""
    blocks = F.pad(codes.to(torch.int32), (0, -codes.shape[-1] % 128), value=2 ** (bits - 1))
    blocks = blocks.unflatten(-1, (-1, 32 // bits, 4 * bits))
    words = blocks[..., 0, :].clone()
    for plane in range(1, 32 // bits):
        words |= blocks[..., plane, :] << bits * plane
    return words.flatten(-2)


def _from_planes(words: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of `_to_planes`: unsigned int32 codes [..., K]."""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32, device=words.device)[:, None]
    return ((words.unflatten(-1, (-1, 1, 4 * bits)) >> shifts) & (2**bits - 1)).flatten(-3)[..., :k]


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The [..., N, K] matrix a packed weight stands for: computed in fp32 (or wider), rounded once to `dtype`. Columns
    stay in stored order when `perm` is set. Not for layout 'cpu'."""
    if weight.layout == "dense" or weight.bits == 16:
        return weight.weight.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if weight.layout == "planes":
        codes = _from_planes(weight.weight, weight.bits, weight.k)
    else:
        codes = _unpack_nibbles(weight.weight) if weight.bits == 4 else weight.weight
    if weight.bits == 8:
        codes = codes.to(wide) - (128 if weight.layout == "planes" else 0)
        return (codes * weight.scales.to(wide)[..., None]).to(dtype)
    zeros = 8 if weight.zeros is None else weight.zeros.to(wide).mT[..., None]
    grouped = codes.to(wide).unflatten(-1, (-1, weight.group_size)) - zeros
    return (grouped * weight.scales.to(wide).mT[..., None]).flatten(-2).to(dtype)


def _pack(plain: PackedWeight, dtype: torch.dtype, layout: str, config: LinearConfig | None) -> PackedWeight:
    device = plain.weight.device
    if layout == "auto":  # measured on CPU: int4pack / int8pack win in bf16 alone, a dequantized matrix in the rest
        two_d, cpu_bf16 = plain.weight.dim() == 2, device.type == "cpu" and dtype == torch.bfloat16
        if _use_triton("packed_linear", plain.weight, "the dtype is float64" * (dtype == torch.float64)):
            layout = "planes"
        elif plain.bits == 16 or (device.type == "cpu" and not cpu_bf16):
            layout = "dense"
        else:
            layout = "cpu" if cpu_bf16 and two_d and plain.bits == 4 and plain.n % 16 == 0 else "plain"
    if layout == "dense":
        return replace(plain, layout=layout, weight=dequantize(plain, dtype), scales=None, zeros=None)
    if layout == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_unpack_nibbles(plain.weight).to(torch.int32), 1)
        shift = 0 * plain.scales if plain.zeros is None else (8 - plain.zeros.float()) * plain.scales.float()
        scales = torch.stack((plain.scales.to(dtype), shift.to(dtype)), -1)
        return replace(plain, layout=layout, weight=packed, scales=scales, zeros=None)
    if layout == "plain":
        return plain
    weight = plain.weight.contiguous()
    if plain.bits < 16:
        weight = _to_planes(_unpack_nibbles(weight) if plain.bits == 4 else weight.to(torch.int32) + 128, plain.bits)
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 82
    tuned = _ACTIVE.get().configs if _ACTIVE.get() else {}
    config = config or tuned.get(shape_key(plain.n, plain.k, plain.bits))
    config = config or linear_config(plain.n, plain.k, plain.bits, count)
    counters = torch.zeros(SMALL_M // 32 * -(-plain.n // 16), dtype=torch.int32, device=device)
    return replace(plain, layout=layout, weight=weight, config=config, counters=counters)


def pack_int4(qweight: Tensor, scales: Tensor, zeros: Tensor | None = None, group_size: int = 128,
              perm: Tensor | None = None, dtype: torch.dtype = torch.float16, layout: str = "auto",
              config: LinearConfig | None = None) -> PackedWeight:
    """Stored int4 -> what the active backend reads, for activations of `dtype`.

    qweight uint8 [..., N, K/2]; scales [..., K/G, N]; zeros uint8 like scales or None (8); leading dims are experts.
    perm int [K]: column j of the stored matrix multiplies x[..., perm[j]] (desc_act). layout 'auto': planes on Triton; on
    CPU torch's int4pack for bf16, else the matrix dequantized once (fastest there, at N K values of memory).
    Raises ValueError for a group size other than 32, 64, 128 or one that does not divide K.
    """
    n, k = qweight.shape[-2], 2 * qweight.shape[-1]
    if group_size not in (32, 64, 128) or k % group_size:
        raise ValueError(f"int4: group size {group_size} does not fit K = {k}; use 32, 64 or 128, a divisor of K")
    if scales.shape != (*qweight.shape[:-2], k // group_size, n):
        raise ValueError(f"int4: scales {tuple(scales.shape)} do not match a [{n}, {k}] weight, want [K/G, N]")
    return _pack(PackedWeight("plain", 4, group_size, n, k, qweight, scales, zeros, perm), dtype, layout, config)


def pack_int8(qweight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float16, layout: str = "auto",
              config: LinearConfig | None = None) -> PackedWeight:
    """Stored int8 [..., N, K] with scales [..., N] -> what the active backend reads (see `pack_int4`). On CPU bf16 keeps
    int8 (torch's int8pack), other dtypes are dequantized once."""
    if scales.shape != qweight.shape[:-1]:
        raise ValueError(f"int8: scales {tuple(scales.shape)} do not match the weight {tuple(qweight.shape)}")
    return _pack(PackedWeight("plain", 8, 0, *qweight.shape[-2:], qweight, scales), dtype, layout, config)


def pack_half(weight: Tensor, layout: str = "auto", config: LinearConfig | None = None) -> PackedWeight:
    """A 16-bit weight [..., N, K] for our own small-M kernel, or for torch's matmul where that is the backend."""
    return _pack(PackedWeight("plain", 16, 0, *weight.shape[-2:], weight), weight.dtype, layout, config)


TILE_M = 64  # rows of one program at most
# Rows of one launch at most, and the widest prefill chunk. Above, the weight is written out in 16 bits and multiplied by
# cuBLAS. Estimate for a 3090, unmeasured (scripts.bench_kernels times both): writing costs 2.5 bytes per int4 weight,
# 3.1 ps, before the product starts; the product takes 2 M / 71e12 s per weight for both, over a share of the matrix rate
# that may be 60 % here and 85 % there: they meet near M = 220. On an H100 ours has the edge for longer.
SMALL_M = 256


def epilogue(y: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> Tensor:
    """What `packed_linear` does after the product, in y's dtype."""
    y = y if bias is None else y + bias
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None,
                  gated: bool = False) -> Tensor:
    """x [..., K] @ W^T [+ bias], [SiLU(first half) * second half if gated], [+ residual] -> [..., N] (gated: N/2).

    No host sync. 'planes': up to SMALL_M rows run our kernel, where a row's bits depend neither on M nor on other rows;
    more rows dequantize and use cuBLAS. Bias and epilogue are computed in fp32 there, in x's dtype elsewhere.
    """
    if weight.perm is not None:
        x = x.index_select(-1, weight.perm)
    if weight.layout == "planes":
        apart = gated and weight.zeros is not None  # two tiles and their zero points would spill
        y = torch.ops.eaglet.planes_linear(
            x, weight.weight, weight.scales, weight.zeros, weight.counters, bias, None if apart else residual,
            weight.bits, weight.group_size, weight.n, gated and not apart, weight.config[:4], weight.config.accumulate)
        return epilogue(y, None, residual, True) if apart else y
    if not torch.compiler.is_compiling():
        _use_triton("packed_linear", x, f"weights are packed as '{weight.layout}', for another backend")
    rows = x.reshape(-1, weight.k)
    if weight.layout == "cpu":
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight.weight, weight.group_size, weight.scales)
    elif weight.bits == 8 and weight.layout == "plain" and rows.dtype == torch.bfloat16 and not rows.is_cuda:
        y = torch.ops.aten._weight_int8pack_mm(rows, weight.weight, weight.scales.to(rows.dtype))
    else:
        y = rows @ dequantize(weight, x.dtype).mT
    return epilogue(y.unflatten(0, x.shape[:-1]), bias, residual, gated)


def _matrix(x, words, scales, zeros, bits: int, group: int, n: int, ours: bool) -> Tensor:
    """The matrix [N, K] of words in the plane layout, for x [..., K]; ours: by our kernel."""
    k = x.shape[-1]
    if not ours or bits == 16:
        return dequantize(PackedWeight("planes", bits, group, n, k, words, scales, zeros), x.dtype)
    out = x.new_empty(n, k)
    _dequantize_kernel[triton.cdiv(n, 32), triton.cdiv(k, 128)](
        words, scales, scales if zeros is None else zeros, out, n, k, BITS=bits, GROUP=group, ZEROS=zeros is not None,
        BN=32, DEVICE=_on_device(x), num_warps=4)
    return out


@torch.library.custom_op("eaglet::planes_linear", mutates_args=())
def planes_linear(x: Tensor, words: Tensor, scales: Tensor | None, zeros: Tensor | None, counters: Tensor,
                  bias: Tensor | None, residual: Tensor | None, bits: int, group: int, n: int, gated: bool,
                  config: list[int], accumulate: str) -> Tensor:
    """`packed_linear` on the plane layout. `counters` is all zero before and after, so it does not count as mutated."""
    k, n_out = x.shape[-1], n // 2 if gated else n
    rows = x.reshape(-1, k).contiguous()
    tokens, ours = rows.shape[0], _use_triton("packed_linear", x)
    if not ours or tokens > SMALL_M:
        y = rows @ _matrix(rows, words, scales, zeros, bits, group, n, ours).mT
        return epilogue(y.unflatten(0, x.shape[:-1]), bias, residual, gated)
    out = x.new_empty((*x.shape[:-1], n_out))
    grid, partial, extra, fixed = _arguments(rows, scales, zeros, bits, group, n_out, gated, config, tokens, accumulate)
    _linear_kernel[grid](
        rows, words, *extra, rows if bias is None else bias, rows if residual is None else residual.contiguous(), out,
        out, partial, counters, tokens, n, k, n_out, BIAS=bias is not None, RESIDUAL=residual is not None, TOPK=0,
        SPLIT=grid[2], **fixed)
    return out


@planes_linear.register_fake
def _(x, words, scales, zeros, counters, bias, residual, bits, group, n, gated, config, accumulate):
    return x.new_empty((*x.shape[:-1], n // 2 if gated else n))


class TopK(NamedTuple):
    """The best of a row's logits; values - log_total[..., None] are their log-probabilities over the whole row."""

    values: Tensor  # [..., K] float32, descending, ties to the lower id, NaN as -inf
    ids: Tensor  # [..., K] int64
    log_total: Tensor  # [...] log-sum-exp of the row


def topk_reference(logits: Tensor, count: int) -> TopK:
    """`TopK` of logits [..., N] that are already there."""
    logits = torch.where(logits.isnan(), -math.inf, logits.to(torch.promote_types(logits.dtype, torch.float32)))
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return TopK(values[..., :count], ids[..., :count], logits.logsumexp(-1))


def packed_topk(x: Tensor, weight: PackedWeight, count: int) -> TopK:
    """The `count` largest of each row of packed_linear(x [..., K], weight), 1 <= count <= N. On Triton (to SMALL_M rows)
    the logits are never stored: every weight tile hands over its own best, merged in tile order. No host sync."""
    if weight.layout != "planes":
        return topk_reference(packed_linear(x, weight), count)
    rows = (x if weight.perm is None else x.index_select(-1, weight.perm)).reshape(-1, weight.k)
    top = torch.ops.eaglet.planes_topk(rows, weight.weight, weight.scales, weight.zeros, weight.counters, weight.bits,
                                       weight.group_size, weight.n, count, weight.config[:4], weight.config.accumulate)
    return TopK(*(t.unflatten(0, x.shape[:-1]) for t in top))


@torch.library.custom_op("eaglet::planes_topk", mutates_args=())
def planes_topk(x: Tensor, words: Tensor, scales: Tensor | None, zeros: Tensor | None, counters: Tensor, bits: int,
                group: int, n: int, topk: int, config: list[int], accumulate: str) -> tuple[Tensor, Tensor, Tensor]:
    """`packed_topk` on the plane layout: rows x [M, K]."""
    x, (tokens, k) = x.contiguous(), x.shape
    wide = f"{topk} candidates exceed a tile of {config[0]} rows" if topk > config[0] else ""
    ours = _use_triton("packed_topk", x, wide)
    if not ours or tokens > SMALL_M:
        matrix = _matrix(x, words, scales, zeros, bits, group, n, ours)
        return tuple(t.clone() for t in topk_reference(x @ matrix.mT, topk))
    grid, partial, extra, fixed = _arguments(x, scales, zeros, bits, group, n, False, config, min(32, tokens), accumulate)
    out, ids = (x.new_empty(grid[1], tokens, topk + more, dtype=d) for more, d in ((2, torch.float32), (0, torch.int32)))
    _linear_kernel[grid](
        x, words, *extra, x, x, out, ids, partial, counters, tokens, n, k, n, BIAS=False, RESIDUAL=False, TOPK=topk,
        SPLIT=grid[2], **fixed)
    values, order = out[..., :topk].transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)
    ids = ids.transpose(0, 1).flatten(1).gather(1, order[:, :topk]).long()
    return values[:, :topk].clone(), ids, (out[..., topk] + out[..., topk + 1].log()).logsumexp(0)


@planes_topk.register_fake
def _(x, words, scales, zeros, counters, bits, group, n, topk, config, accumulate):
    values = x.new_empty(x.shape[0], topk, dtype=torch.promote_types(x.dtype, torch.float32))
    return values, torch.empty_like(values, dtype=torch.int64), torch.empty_like(values[:, 0])


def packed_experts(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight,
                   down: PackedWeight) -> Tensor:
    """Mixture-of-experts MLP: sum over slots j, in slot order, of expert_weights[t, j] * MLP_{expert_ids[t, j]}(x[t]).

    x [T,H]; expert_ids [T,k] int64; expert_weights [T,k]; gate_up packs [E,2I,H], down packs [E,H,I]. Returns [T,H] in
    x's dtype, summed in fp32. On Triton: no host sync, an active expert's weights are read once; elsewhere the host
    reads which experts are active.
    """
    hidden = _experts(x, expert_ids, gate_up, True)
    y = _experts(hidden, expert_ids, down, False)
    weights = expert_weights.to(torch.promote_types(x.dtype, torch.float32))[..., None]
    out = y[:, 0] * weights[:, 0]
    for slot in range(1, expert_ids.shape[1]):
        out = out + y[:, slot] * weights[:, slot]
    return out.to(x.dtype)


def _experts(x: Tensor, expert_ids: Tensor, weight: PackedWeight, gated: bool) -> Tensor:
    if weight.perm is not None:
        x = x.index_select(-1, weight.perm)
    apart = gated and weight.zeros is not None  # as in `packed_linear`
    y = torch.ops.eaglet.expert_linear(
        x, expert_ids, weight.weight, weight.scales, weight.zeros, weight.layout, weight.bits, weight.group_size,
        weight.n, gated and not apart, weight.config[:4], weight.config.accumulate)
    return epilogue(y, None, None, True) if apart else y


@torch.library.custom_op("eaglet::expert_linear", mutates_args=())
def expert_linear(x: Tensor, expert_ids: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
                  layout: str, bits: int, group: int, n: int, gated: bool, config: list[int], accumulate: str) -> Tensor:
    """Row (t, j) of the [T,k,N] result is expert expert_ids[t, j] applied to x[t] (x [T,K]) or x[t, j] (x [T,k,K])."""
    tokens, slots = expert_ids.shape
    k, n_out = x.shape[-1], n // 2 if gated else n
    rows, div = x.reshape(-1, k).contiguous(), slots if x.dim() == 2 else 1
    out, experts = x.new_empty(tokens, slots, n_out), expert_ids.flatten()
    other = "" if layout == "planes" else f"weights are packed as '{layout}', for another backend"
    if not _use_triton("packed_experts", x, other):
        for e in experts.unique().tolist():
            pick = [None if t is None else t[e] for t in (weight, scales, zeros)]
            matrix = dequantize(PackedWeight(layout, bits, group, n, k, *pick), x.dtype)
            pairs = (experts == e).nonzero().squeeze(1)
            out.view(-1, n_out)[pairs] = epilogue(rows[pairs // div] @ matrix.mT, None, None, gated)
        return out
    pairs = experts.argsort(stable=True).to(torch.int32)
    bounds = torch.arange(weight.shape[0] + 1, device=x.device)
    offsets = (experts[None, :] < bounds[:, None]).sum(1, dtype=torch.int32)
    config = [config[0], 1, *config[2:]]  # no split, and 16 rows a tile whatever the number of tokens
    grid, _, extra, fixed = _arguments(rows, scales, zeros, bits, group, n_out, gated, config, 16, accumulate)
    _expert_kernel[triton.cdiv(tokens, fixed["BT"]), grid[1], weight.shape[0]](
        rows, weight, *extra, out, pairs, offsets, n, k, n_out, div, **fixed)
    return out


@expert_linear.register_fake
def _(x, expert_ids, weight, scales, zeros, layout, bits, group, n, gated, config, accumulate):
    return x.new_empty(*expert_ids.shape, n // 2 if gated else n)


# ---------------------------------------------------------------------------------------------- norm, rope


@_jit
def _rms_norm_kernel(x, w, out, SIZE, eps, BLOCK: tl.constexpr):
    """One program per row: variance in fp32, rounded to x's dtype before the weight (LLaMA's order)."""
    d = tl.arange(0, BLOCK)
    at = tl.program_id(0) * SIZE + d
    row = tl.load(x + at, mask=d < SIZE, other=0).to(tl.float32)
    row = (row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)).to(x.dtype.element_ty).to(tl.float32)
    y = row * tl.load(w + d, mask=d < SIZE, other=0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=d < SIZE)


@_jit
def _store_row(kv, kv_scales, at, d, y, HD: tl.constexpr, INT8: tl.constexpr):
    """One key or value row y (fp32) into the cache at element `at`, quantized like `quantize_rows` if INT8."""
    if INT8:
        scale = tl.max(tl.abs(y), 0) / 127
        y = tl.floor(y / tl.where(scale == 0, 1.0, scale) + 0.5)
        y = tl.where(tl.abs(y) < 128, y, 0.0)
        tl.store(kv_scales + (at + HD) // 4, scale)
    tl.store(kv + at + d, y.to(kv.dtype.element_ty), mask=d < HD)


@_jit
def _load_rows(kv, kv_scales, at, d, mask, DT: tl.constexpr, HD: tl.constexpr, INT8: tl.constexpr):
    """Key or value rows at elements `at` [...], columns d -> [..., hd] in DT; zero where not mask [...]."""
    there = tl.expand_dims(mask, -1) & (d < HD)
    rows = tl.load(kv + tl.expand_dims(at, -1) + d, mask=there, other=0)
    if INT8:
        scale = tl.load(kv_scales + (at + HD) // 4, mask=mask, other=0)
        rows = rows.to(tl.float32) * tl.expand_dims(scale, -1)
    return rows.to(DT)


@_jit
def _rope_kernel(qkv, cos, sin, kv, kv_scales, slots, q_weight, k_weight, out, v_offset, T, S, eps,
                 HQ: tl.constexpr, HKV: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
                 INT8: tl.constexpr):
    """Grid (B T, HQ + 2 HKV): one head of one token: [norm,] rotate, write to q, the key cache or the value cache."""
    row, head = tl.program_id(0), tl.program_id(1)
    b, t = row // T, row % T
    d = tl.arange(0, BLOCK)
    ok = d < HD
    at = (row * (HQ + 2 * HKV) + head) * HD
    x = tl.load(qkv + at + d, mask=ok, other=0)
    slot = tl.load(slots + row)
    cache = ((b * HKV + (head - HQ) % HKV).to(tl.int64) * S + slot) * (HD + 4 * INT8)
    if head >= HQ + HKV:
        _store_row(kv, kv_scales, cache + v_offset, d, x.to(tl.float32), HD, INT8)
    else:
        half: tl.constexpr = HD // 2
        other = tl.where(d < half, d + half, d - half)
        a = x.to(tl.float32)
        c = tl.load(qkv + at + other, mask=ok, other=0).to(tl.float32)
        if NORM:
            w = q_weight if head < HQ else k_weight
            inverse = tl.rsqrt(tl.sum(a * a, 0) / HD + eps)
            DT: tl.constexpr = qkv.dtype.element_ty
            wa = tl.load(w + d, mask=ok, other=0).to(tl.float32)
            wc = tl.load(w + other, mask=ok, other=0).to(tl.float32)
            a = ((a * inverse).to(DT).to(tl.float32) * wa).to(DT).to(tl.float32)
            c = ((c * inverse).to(DT).to(tl.float32) * wc).to(DT).to(tl.float32)
        co = tl.load(cos + row * half + d % half, mask=ok, other=0).to(tl.float32)
        si = tl.load(sin + row * half + d % half, mask=ok, other=0).to(tl.float32)
        y = a * co + tl.where(d < half, -c, c) * si
        if head < HQ:
            tl.store(out + ((b * HQ + head) * T + t) * HD + d, y.to(out.dtype.element_ty), mask=ok)
        else:
            y = tl.where(ok, y.to(qkv.dtype.element_ty).to(tl.float32), 0.0)
            _store_row(kv, kv_scales, cache, d, y, HD, INT8)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):  # nothing to round: one call
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of x [..., H]; weight [H]; variance in float32 or wider, as LLaMA does it. On Triton
    one program per row, so rows are independent; with gradients always plain code."""
    return (_rms_norm_reference if _plain(x, weight) else torch.ops.eaglet.rms_norm)(x, weight, eps)


@torch.library.custom_op("eaglet::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _use_triton("rms_norm", x, "the weight has another dtype" * (weight.dtype != x.dtype)):
        return _rms_norm_reference(x, weight, eps)
    x, out, size = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x, weight, out, size, eps, BLOCK=block, num_warps=min(16, max(4, block // 1024)))
    return out


@_rms_norm_op.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)


def _rope_reference(qkv, cos, sin, kv, slots, q_weight, k_weight, eps: float) -> Tensor:
    kv_heads = kv.shape[2]
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), 2)
    if q_weight is not None:
        q, k = _rms_norm_reference(q, q_weight, eps), _rms_norm_reference(k, k_weight, eps)
    # q and k turn together: x cos, then the other half's share in place. A third of the calls of the textbook form.
    x = torch.cat((q, k), 2) if q_weight is not None else qkv.narrow(2, 0, q.shape[2] + kv_heads)
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = x.unflatten(-1, (2, -1)) * cos[:, :, :, None]
    turned.select(3, 0).addcmul_(high, -sin)
    turned.select(3, 1).addcmul_(low, sin)
    q, k = turned.flatten(3).to(x.dtype).transpose(1, 2).split((q.shape[2], kv_heads), 1)
    write_kv(kv, k, v.transpose(1, 2), slots)
    return q


def _cache_problem(kv: Tensor) -> str:
    return "" if kv[0].is_contiguous() else "the cache of one layer is not contiguous"


def _cache_scales(kv: Tensor) -> Tensor:
    """The same memory as float32, where the scales of an int8 cache are (another cache: a placeholder)."""
    return kv.view(torch.float32) if kv.dtype == torch.int8 else kv


def rope_write_kv(qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, q_weight: Tensor | None = None,
                  k_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotate q and k (after a per-head RMS norm if weights [hd] are given), write k, v into the cache, return q.

    qkv [B,T,Hq+2Hkv,hd]; cos, sin [B,T,hd/2] fp32, dimension i pairs with i + hd/2; kv [2,B,Hkv,S,hd] or int8
    [2,B,Hkv,S,hd+4] (`quantize_rows`), keys and values each contiguous, written in place at slots [B,T] int64. Returns
    q [B,Hq,T,hd]. No host sync.
    """
    plain = _plain(qkv, q_weight) and kv.dtype != torch.int8  # Inductor cannot fuse the bytes of the scales
    op = _rope_reference if plain else torch.ops.eaglet.rope_write_kv
    return op(qkv, cos, sin, kv, slots, q_weight, k_weight, eps)


@torch.library.custom_op("eaglet::rope_write_kv", mutates_args=("kv",))
def _rope_op(qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, q_weight: Tensor | None,
             k_weight: Tensor | None, eps: float) -> Tensor:
    if not _use_triton("rope_write_kv", qkv, _cache_problem(kv)):
        return _rope_reference(qkv, cos, sin, kv, slots, q_weight, k_weight, eps).contiguous()
    (B, T, heads, dim), (kv_heads, S) = qkv.shape, kv.shape[2:4]
    out = qkv.new_empty(B, heads - 2 * kv_heads, T, dim)
    qkv, norm = qkv.contiguous(), q_weight is not None
    _rope_kernel[B * T, heads](
        qkv, cos.contiguous(), sin.contiguous(), kv, _cache_scales(kv), slots.contiguous(), q_weight if norm else qkv,
        k_weight if norm else qkv, out, kv.stride(0), T, S, eps, HQ=heads - 2 * kv_heads, HKV=kv_heads, HD=dim,
        BLOCK=triton.next_power_of_2(dim), NORM=norm, INT8=kv.dtype == torch.int8, num_warps=1)
    return out


@_rope_op.register_fake
def _(qkv, cos, sin, kv, slots, q_weight, k_weight, eps):
    B, T, heads, dim = qkv.shape
    return qkv.new_empty(B, heads - 2 * kv.shape[2], T, dim)


# ---------------------------------------------------------------------------------------------- tree attention


def _attend_one(q, kv, visible, positions, start: int, window: int, scale: float) -> Tensor:
    """One sequence: q [1,Hq,T,hd]; kv [2,1,Hkv,S,hd] (int8: hd+4); visible [T,R]; returns [1,Hq,T,hd]. Host sync."""
    (_, query_heads, T, dim), (kv_heads, S), R = q.shape, kv.shape[2:4], visible.shape[1]
    low = max(0, min(start, int(positions.min()) - window + 1)) if window > 0 else 0
    if start + R <= S:
        kv = kv.narrow(3, low, start + R - low)
    else:  # the last region rows share the trash row
        slots = torch.cat((torch.arange(low, start), torch.arange(start, start + R).clamp_(max=S - 1)))
        kv = kv[:, :, :, slots.to(kv.device)]
    if kv.dtype == torch.int8:
        kv = dequantize_rows(kv, q.dtype)
    k, v = kv.unbind(0)
    group = query_heads // kv_heads
    if T == 1 and window <= 0 and (R == 1 or bool(visible.all())):
        out = F.scaled_dot_product_attention(q.reshape(1, kv_heads, group, dim), k, v, scale=scale)
        return out.view(q.shape)
    # Queries that share a key head are the heads of one batch entry: neither keys nor the mask are copied for them.
    grouped = q.reshape(kv_heads, group, T, dim)
    mask = torch.zeros(T, start - low + R, dtype=q.dtype, device=q.device)
    if window > 0:
        outside = torch.arange(low, start, device=q.device) <= positions[:, None] - window
        mask[:, : start - low].masked_fill_(outside, -math.inf)
    mask[:, start - low :].masked_fill_(~visible, -math.inf)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.transpose(0, 1).expand(-1, group, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)

    out = attend(k, v)
    if math.isfinite(out.sum()):
        return out
    # 0 x NaN = NaN: load rows that some query may not see as zero, then mark exactly the queries that do see them
    poisoned = ~(torch.isfinite(k) & torch.isfinite(v)).all(-1)
    bad = (poisoned[..., None, :] & (mask == 0)).any(-1).repeat_interleave(group, 1)
    out = attend(k.masked_fill(poisoned[..., None], 0), v.masked_fill(poisoned[..., None], 0))
    return out.masked_fill(bad[..., None], float("nan"))


def tree_attention_reference(q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int,
                             scale: float) -> Tensor:
    """Plain-PyTorch `tree_attention`; reads `start` on the host, so its cost follows the live length, not S."""
    if len(starts := start.tolist()) == 1:
        return _attend_one(q, kv, visible[0], positions[0], starts[0], window, scale).contiguous()
    return torch.cat([_attend_one(q[b : b + 1], kv[:, b : b + 1], visible[b], positions[b], n, window, scale)
                      for b, n in enumerate(starts)])


@_jit
def _row_geometry(start, positions, b, m, T, R, ROWS, REGION: tl.constexpr):
    """Query rows m = g * T + t of sequence b: (valid, t, position, end of the keys that the chunk kernel handles)."""
    ok = m < ROWS
    t = m % T
    n = tl.load(start + b).to(tl.int32)
    p = tl.load(positions + b * T + t, mask=ok, other=0).to(tl.int32)
    if REGION:
        limit = tl.zeros_like(p) + n + R
    else:
        limit = tl.minimum(tl.maximum(p - 16, 0) // 16 * 16, n)
    return ok, t, n, p, tl.where(ok, limit, 0)


@_jit
def _split_bounds(split):
    """The keys [first, last) of a split: 8 splits of 128, 8 of 256, 512 and 1024, then all of 2048 (performance.md 5), so
    that short contexts fill the GPU and partials stay few. Nothing follows S: drafters allocate different caches."""
    octave = tl.minimum(split // 8, 4)
    first = 1024 * ((1 << octave) - 1) + (split - 8 * octave) * (128 << octave)
    return first, first + (128 << octave)


@_jit
def _rescale(top, other):
    """(joint maximum, the same or 0 to subtract, factor for what was summed under top) of an online softmax."""
    new = tl.maximum(top, other)
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, safe, tl.exp(top - safe)


@_jit
def _attend_chunks_kernel(q, kv, kv_scales, start, visible, positions, acc_out, ml_out, v_offset, S, T, R, ROWS, SPLITS,
                          scale, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, WINDOW: tl.constexpr,
                          REGION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, INT8: tl.constexpr,
                          DEVICE: tl.constexpr):
    """Tensor-core part: keys [0, limit) of every query row, limit = 16 floor((p - 16) / 16) (REGION: all of them, for
    prefill). Grid (B Hkv, splits, row tiles). Key blocks sit at absolute multiples of BK and a masked block changes
    nothing, bit for bit, so a row's partial depends on its position and its keys alone."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b = bh // HKV
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    ok, t, n, p, limit = _row_geometry(start, positions, b, m, T, R, ROWS, REGION)
    end = tl.max(limit, 0)
    first, last = _split_bounds(split)
    low, high = first, end if REGION else tl.minimum(last, end)
    if WINDOW > 0:
        low = tl.maximum(low, (tl.min(tl.where(ok, p, 2147483647), 0) - WINDOW + 1) // BK * BK)
    if first < end:
        d = tl.arange(0, HDP)
        DT: tl.constexpr = q.dtype.element_ty
        real = ok[:, None] & (d < HD)[None, :]
        query = tl.load(q + (bh * ROWS + m[:, None]) * HD + d[None, :], mask=real, other=0)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, HDP), tl.float32)
        for j0 in range(low, high, BK):
            j = j0 + tl.arange(0, BK)
            slot = tl.minimum(j, S - 1)
            at = (bh.to(tl.int64) * S + slot) * (HD + 4 * INT8)
            k = _load_rows(kv, kv_scales, at, d, j < end, DT, HD, INT8)
            v = _load_rows(kv, kv_scales, at + v_offset, d, j < end, DT, HD, INT8)
            spoilt = tl.zeros((BK,), tl.int32)
            if WINDOW > 0 or REGION:  # queries of a tile differ in what they see: 0 x NaN must not reach the others
                usable = tl.abs(v.to(tl.float32)) < float("inf")
                spoilt = tl.max(tl.where(usable, 0, 1), 1)
                v = tl.where(usable, v, 0.0).to(v.dtype)
            see = j[None, :] < limit[:, None]
            if WINDOW > 0:
                see = see & ((j[None, :] > p[:, None] - WINDOW) | (j[None, :] >= n))
            if REGION:
                r = j - n
                inside = ok[:, None] & ((r >= 0) & (r < R))[None, :]
                vis = tl.load(visible + (b * T + t[:, None]) * R + r[None, :], mask=inside, other=0)
                see = see & ((r < 0)[None, :] | (vis != 0))
            dots = _dot(query, tl.trans(k), tl.zeros((BM, BK), tl.float32), DEVICE)
            score = tl.where(see, dots * scale, float("-inf"))
            new, safe, shrink = _rescale(top, tl.max(score, 1))
            weight = tl.exp(score - safe[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = _dot(weight.to(v.dtype), v, acc * shrink[:, None], DEVICE)
            if WINDOW > 0 or REGION:
                hit = tl.max(tl.where(see & (spoilt != 0)[None, :], 1, 0), 1)
                acc = tl.where((hit != 0)[:, None], float("nan"), acc)
            top = new
        at = (bh * SPLITS + split) * ROWS + m
        tl.store(acc_out + at[:, None] * HD + d[None, :], acc, mask=real)
        tl.store(ml_out + at * 2, top, mask=ok)
        tl.store(ml_out + at * 2 + 1, total, mask=ok)


@_jit
def _attend_tail_kernel(q, kv, kv_scales, start, visible, positions, acc_in, ml_in, out, v_offset, S, T, R, ROWS, SPLITS,
                        scale, HKV: tl.constexpr, HD: tl.constexpr, HDP: tl.constexpr, RP: tl.constexpr,
                        WINDOW: tl.constexpr, REGION: tl.constexpr, RT: tl.constexpr, INT8: tl.constexpr):
    """Merge a row's partials in split order, then its tail: key i of the tail is position limit + i, whichever slot
    it is in (history, or the i-th visible region row), so verify and plain decoding reduce the same operands in the same
    places. Every query gathers only rows it sees; others are loaded as zero. Grid (B Hkv, row tiles)."""
    bh = tl.program_id(0)
    b = bh // HKV
    m = tl.program_id(1) * RT + tl.arange(0, RT)
    ok, t, n, p, limit = _row_geometry(start, positions, b, m, T, R, ROWS, REGION)
    d = tl.arange(0, HDP)
    real = ok[:, None] & (d < HD)[None, :]
    top = tl.full((RT,), float("-inf"), tl.float32)
    total = tl.zeros((RT,), tl.float32)
    acc = tl.zeros((RT, HDP), tl.float32)
    first, split = 0, 0
    while first < tl.max(limit, 0):
        live = first < limit
        at = (bh * SPLITS + split) * ROWS + m
        top_s = tl.load(ml_in + at * 2, mask=live, other=float("-inf"))
        total_s = tl.load(ml_in + at * 2 + 1, mask=live, other=0)
        acc_s = tl.load(acc_in + at[:, None] * HD + d[None, :], mask=live[:, None] & real, other=0)
        new, safe, mine = _rescale(top, top_s)
        theirs = tl.exp(top_s - safe)
        total = total * mine + total_s * theirs
        acc = acc * mine[:, None] + acc_s * theirs[:, None]
        top, split = new, split + 1
        first = 2147483647 if REGION else _split_bounds(split)[0]
    if not REGION:
        base = bh.to(tl.int64) * S * (HD + 4 * INT8)
        values = kv + base + v_offset
        query = tl.load(q + (bh * ROWS + m[:, None]) * HD + d[None, :], mask=real, other=0).to(tl.float32)
        r = tl.arange(0, RP)
        seen = ok[:, None] & (r < R)[None, :]
        vis = tl.load(visible + (b * T + t[:, None]) * R + r[None, :], mask=seen, other=0).to(tl.int32)
        rank = tl.cumsum(vis, 1) * vis  # 1, 2, ... for the visible region rows, in slot order = position order
        count = tl.sum(vis, 1)
        for step in range(tl.cdiv(tl.max(tl.where(ok, n - limit + count, 0), 0), 16)):
            j = limit[:, None] + step * 16 + tl.arange(0, 16)[None, :]
            nth = j - n
            row = tl.sum(tl.where(rank[:, None, :] == nth[:, :, None] + 1, r[None, None, :], 0), 2)
            slot = tl.where(nth < 0, j, tl.minimum(n + row, S - 1))
            see = ok[:, None] & (nth < count[:, None])
            if WINDOW > 0:
                see = see & ((nth >= 0) | (j > p[:, None] - WINDOW))
            at = slot * (HD + 4 * INT8)
            k = _load_rows(kv + base, kv_scales + base // 4, at, d, see, tl.float32, HD, INT8)
            v = _load_rows(values, kv_scales + (base + v_offset) // 4, at, d, see, tl.float32, HD, INT8)
            score = tl.where(see, tl.sum(query[:, None, :] * k, 2) * scale, float("-inf"))
            new, safe, shrink = _rescale(top, tl.max(score, 1))
            weight = tl.exp(score - safe[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * v, 1)
            top = new
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + (bh * ROWS + m[:, None]) * HD + d[None, :], acc.to(out.dtype.element_ty), mask=real)


def _attention_tiles(dim: int, region: bool, int8: bool, window: int) -> tuple[dict, dict]:
    """Constants and compiler options of the chunk and the tail kernel: the largest tiles that neither spill nor exceed
    99 KB of shared memory. Not of T: a tile of another height means other matrix instructions (sm_90: wgmma from 64 rows)
    and another order of sums, so verify would differ from plain decoding. Prefill (region) is the same for both."""
    chunks = dict(BM=32 << region, BK=64 >> (region or int8) + (dim > 128), num_warps=4 << region, num_stages=2)
    return chunks, dict(RT=4 if dim <= 128 else 2, num_warps=4, maxnreg=200 if window > 0 else None)  # ptxas stops at 168


def _tree_attention_triton(q, kv, start, visible, positions, window: int, scale: float) -> Tensor:
    """Two launches; the grid depends on S and T alone, loop bounds are read on device."""
    (batch, query_heads, T, dim), (kv_heads, S, R) = q.shape, (kv.shape[2], kv.shape[3], visible.shape[2])
    rows, region, int8 = query_heads // kv_heads * T, T > 64 or R > 128, kv.dtype == torch.int8
    octave = min((S // 1024 + 1).bit_length() - 1, 4)
    splits = 1 if region else 8 * octave + triton.cdiv(S - 1024 * (2**octave - 1), 128 << octave)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    acc = q.new_empty(batch * kv_heads, splits, rows, dim, dtype=torch.float32)
    ml = q.new_empty(batch * kv_heads, splits, rows, 2, dtype=torch.float32)
    tensors = (q.contiguous(), kv, _cache_scales(kv), start, visible.contiguous().view(torch.uint8),
               positions.contiguous(), acc, ml)
    sizes = (kv.stride(0), S, T, R, rows, splits, scale)
    fixed = dict(HKV=kv_heads, HD=dim, HDP=max(16, triton.next_power_of_2(dim)), WINDOW=max(window, 0), REGION=region,
                 INT8=int8)
    chunks, tail = _attention_tiles(dim, region, int8, window)
    _attend_chunks_kernel[batch * kv_heads, splits, triton.cdiv(rows, chunks["BM"])](
        *tensors, *sizes, **fixed, **chunks, DEVICE=_on_device(q))
    _attend_tail_kernel[batch * kv_heads, triton.cdiv(rows, tail["RT"])](
        *tensors, out, *sizes, **fixed, **tail, RP=1 if region else triton.next_power_of_2(R))
    return out


def tree_attention(q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int,
                   scale: float) -> Tensor:
    """Attention of T tree rows over a static cache (DESIGN.md sections 3 and 4).

    q [B,Hq,T,hd]; kv [2,B,Hkv,S,hd] or int8 [...,hd+4], one layer that already holds this forward's rows; start
    [B] int64, first slot of the tree region (region row r lies in slot min(start + r, S-1)); visible [B,T,R] bool,
    query t may see region row r (window already applied); positions [B,T] int64. Every slot j < start
    is visible history, restricted to j > position - window when window > 0. Returns [B,Hq,T,hd] in q's dtype. A row
    that a query may not see never influences it, even if it holds NaN. Inference only (no autograd). On CPU it reads
    `start` on the host. """
    return torch.ops.eaglet.tree_attention(q, kv, start, visible, positions, window, scale)


def _tree_attention_op(q, kv, start, visible, positions, window, scale):
    problem = _cache_problem(kv) if kv.dtype in (q.dtype, torch.int8) else "queries and cache differ in dtype"
    use = _tree_attention_triton if _use_triton("tree_attention", q, problem) else tree_attention_reference
    return use(q, kv, start, visible, positions, window, scale)


def _register() -> torch.library.Library:
    """By hand: `custom_op` would add 20 us per call on CPU, which a small model pays once per layer."""
    library = torch.library.Library("eaglet", "FRAGMENT")
    arguments = "Tensor q, Tensor kv, Tensor start, Tensor visible, Tensor positions, int window, float scale"
    library.define(f"tree_attention({arguments}) -> Tensor")
    library.impl("tree_attention", _tree_attention_op, "CompositeExplicitAutograd")
    torch.library.register_fake("eaglet::tree_attention", lambda q, *rest: q.new_empty(q.shape), lib=library)
    return library


_LIBRARY = _register()  # keeps the registration alive
