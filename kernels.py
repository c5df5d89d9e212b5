"""Every operation with a hand-written kernel, next to its plain-PyTorch reference of the same signature.

The reference is also the CPU path. An operation whose cost or result may depend on the backend is a torch operator
(`torch.ops.eaglet.*`), opaque to torch.compile, which asks the active `KernelBackend` at run time; operations that plain
PyTorch expresses well (cache writes) are ordinary functions that trace and fuse.
"""

from __future__ import annotations

import contextvars
import importlib.util
import math
import os
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = ("tree_attention",)


def _triton_missing(device_type: str) -> str:
    """Why Triton kernels cannot run on tensors of this device type; '' when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device_type == "cuda":
        return ""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton runs on '{device_type}' tensors only under TRITON_INTERPRET=1 (set before starting)"
    return ""


@dataclass(frozen=True)
class KernelBackend:
    """Which implementation every operation uses on one device, decided once on the host.

    mode 'auto': Triton on CUDA, reference elsewhere. 'triton' / 'reference': exactly that, or ValueError naming why not.
    `table` maps operation -> (backend, reason) for reports. Use it as `with backend.active(): ...` around a step: operators
    read it when they run (also while a CUDA graph is captured); outside of any such block 'auto' for the tensor's device
    holds. Per context, not per process: two engines may differ.
    """

    mode: str = "auto"
    device_type: str = "cpu"
    table: dict[str, tuple[str, str]] = field(init=False, compare=False)

    def __post_init__(self):
        if self.mode not in ("auto", "triton", "reference"):
            raise ValueError(f"kernels: unknown backend '{self.mode}', use one of auto, triton, reference")
        if self.mode == "reference":
            choice = ("reference", "asked for")
        elif self.mode == "auto" and self.device_type != "cuda":
            choice = ("reference", f"auto: '{self.device_type}' has no Triton target")
        else:
            missing = _triton_missing(self.device_type)
            if missing:
                raise ValueError(
                    f"kernels: backend '{self.mode}' needs Triton, but {missing}; use --kernels reference"
                )
            choice = ("triton", "asked for" if self.mode == "triton" else "auto: device is CUDA")
        object.__setattr__(self, "table", dict.fromkeys(OPERATIONS, choice))

    def active(self):
        """Context manager: operators called inside use this backend."""
        return _Activation(self)

    def report(self) -> str:
        """One line per operation: name, backend, why."""
        return "\n".join(f"{name}: {kind} ({why})" for name, (kind, why) in self.table.items())


_ACTIVE: contextvars.ContextVar[KernelBackend | None] = contextvars.ContextVar("eaglet_kernels", default=None)


class _Activation:
    def __init__(self, backend: KernelBackend):
        self.backend = backend

    def __enter__(self) -> KernelBackend:
        self.token = _ACTIVE.set(self.backend)
        return self.backend

    def __exit__(self, *exc):
        _ACTIVE.reset(self.token)


def _use_triton(operation: str, x: Tensor) -> bool:
    backend = _ACTIVE.get()
    if backend is None:
        backend = KernelBackend("auto", x.device.type) if x.is_cuda else None
    return backend is not None and backend.table[operation][0] == "triton"


# ---------------------------------------------------------------------------------------------- KV cache


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the rows of one forward into one layer's cache, in place.

    kv_layer [2,B,Hkv,S,hd]; k, v [B,Hkv,T,hd], cast to the cache dtype; slots [B,T] int64 in 0..S-1 (the caller clamps
    to the trash row S-1; only that row may occur twice). No host sync, traceable.
    """
    rows = torch.stack((k, v)).to(kv_layer.dtype)
    if slots.shape[0] == 1:
        kv_layer.index_copy_(3, slots[0], rows)
    else:
        index = slots[None, :, None, :, None].expand(rows.shape)
        kv_layer.scatter_(3, index, rows)


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


# ---------------------------------------------------------------------------------------------- tree attention


def _attend_one(q, k, v, visible, positions, start: int, window: int, scale: float) -> Tensor:
    """One sequence: q [Hq,T,hd]; k, v [Hkv,S,hd]; visible [T,R]; returns [Hkv,G*T,hd]. Reads sizes on the host."""
    (query_heads, T, dim), (kv_heads, S, _), R = q.shape, k.shape, visible.shape[1]
    low = max(0, min(start, int(positions.min()) - window + 1)) if window > 0 else 0
    if start + R <= S:
        k, v = k[:, low : start + R], v[:, low : start + R]
    else:  # the last region rows share the trash row
        slots = torch.cat((torch.arange(low, start), torch.arange(start, start + R).clamp_(max=S - 1)))
        k, v = k[:, slots.to(k.device)], v[:, slots.to(k.device)]
    group = query_heads // kv_heads
    q = q.reshape(1, kv_heads, group * T, dim)
    if T == 1 and window <= 0 and (R == 1 or bool(visible.all())):
        return F.scaled_dot_product_attention(q, k[None], v[None], scale=scale)[0]
    history = torch.ones(T, start - low, dtype=torch.bool, device=q.device)
    if window > 0:
        history = torch.arange(low, start, device=q.device) > positions[:, None] - window
    mask = torch.cat((history, visible), 1)
    first = 0 if window > 0 else start - low  # rows that some query may not see
    hidden_sum = k[:, first:].sum(dtype=torch.float64) + v[:, first:].sum(dtype=torch.float64)
    clean = math.isfinite(hidden_sum)
    if not clean:  # 0 x NaN = NaN: load such rows as zero, then mark exactly the queries that do see them
        poisoned = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
        k, v = k.masked_fill(poisoned[..., None], 0), v.masked_fill(poisoned[..., None], 0)
        bad = (poisoned[:, None, :] & mask).any(-1).repeat(1, group)
    grouped = mask.repeat(group, 1) if group > 1 else mask
    out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=grouped, scale=scale)[0]
    return out if clean else out.masked_fill(bad[..., None], float("nan"))


def tree_attention_reference(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float
) -> Tensor:
    """Plain-PyTorch `tree_attention`; reads `start` on the host, so its cost follows the live length, not S."""
    rows = [
        _attend_one(q[b], kv[0, b], kv[1, b], visible[b], positions[b], n, window, scale)
        for b, n in enumerate(start.tolist())
    ]
    out = rows[0] if len(rows) == 1 else torch.stack(rows)
    return out.reshape(q.shape)


@torch.library.custom_op("eaglet::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor, kv: Tensor, start: Tensor, visible: Tensor, positions: Tensor, window: int, scale: float
) -> Tensor:
    """Attention of T tree rows over a static cache (DESIGN.md sections 3 and 4).

    q [B,Hq,T,hd]; kv [2,B,Hkv,S,hd], one layer that already holds this forward's rows; start [B] int64, first slot of
    the tree region (region row r lies in slot min(start + r, S-1)); visible [B,T,R] bool, query t may see region row r
    (window already applied); positions [B,T] int64. Every slot j < start is visible history, restricted to
    j > position - window when window > 0. Returns [B,Hq,T,hd] in q's dtype. A row that a query may not see never
    influences it, even if it holds NaN. Inference only (no autograd). On CPU it reads `start` on the host.
    """
    return tree_attention_reference(q, kv, start, visible, positions, window, scale)


@tree_attention.register_fake
def _(q, kv, start, visible, positions, window, scale):
    return q.new_empty(q.shape)
