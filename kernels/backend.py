"""Which implementation every operation uses, a Triton kernel or its plain-PyTorch reference, and why."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.tuned import LinearConfig

try:
    import triton
    import triton.language as tl
except ImportError:  # A machine without Triton runs every reference.
    triton = tl = None

jit = triton.jit if triton else (lambda function: function)
constexpr = tl.constexpr if triton else str
# Whether TRITON_INTERPRET=1 was set at the start: kernels then run on the CPU, slowly, to be tested.
INTERPRETED = triton is not None and triton.knobs.runtime.interpret

OPERATIONS = ("packed_linear", "packed_topk", "packed_experts", "tree_attention", "rms_norm", "rope_write_kv")


@dataclass(frozen=True)
class KernelBackend:
    """Which implementation every operation uses on one device. The choice is made once, on the host.

    mode 'auto' means Triton on CUDA and the reference elsewhere. 'triton' and 'reference' mean exactly that.
    If 'triton' cannot run at all, creating the backend is a ValueError that says why.

    Pack weights and run steps inside `with backend.active():`. An operator reads the active backend when it
    runs or is captured. Outside of such a block, 'auto' holds for the device of the tensor. If a kernel
    cannot do one call (float64, for example), the call is a ValueError under 'triton'. Under 'auto' the
    reference does it and `declined` says why.
    """

    mode: str = "auto"
    device_type: str = "cpu"
    # Measured tilings by `shape_key`. Packing uses them.
    configs: Mapping[str, LinearConfig] = field(compare=False, default_factory=dict)
    # Operation -> ('triton' or 'reference', why).
    table: dict[str, tuple[str, str]] = field(init=False, compare=False)
    # Operation -> why the reference did a call that Triton should have done.
    declined: dict[str, str] = field(init=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "triton", "reference"):
            raise ValueError(f"kernels: unknown backend '{self.mode}', use one of auto, triton, reference")
        if self.mode == "reference":
            choice = ("reference", "asked for")
        elif self.mode == "auto" and self.device_type != "cuda":
            choice = ("reference", f"auto: '{self.device_type}' has no Triton target")
        elif triton is None:
            raise ValueError("kernels: triton is not installed. Use pip install triton or --kernels reference.")
        elif self.device_type != "cuda" and not INTERPRETED:
            raise ValueError(
                f"kernels: Triton runs on '{self.device_type}' only under its interpreter. "
                "Set TRITON_INTERPRET=1 before the start or use --kernels reference."
            )
        else:
            choice = ("triton", "asked for" if self.mode == "triton" else "auto: the device is CUDA")
        object.__setattr__(self, "table", dict.fromkeys(OPERATIONS, choice))

    @contextlib.contextmanager
    def active(self) -> Iterator[KernelBackend]:
        """Operators that are called inside the block use this backend."""
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    def describe(self) -> dict[str, str]:
        """Operation -> its backend and why, with the reason of a declined call if there was one."""
        lines = {name: f"{kind} ({why})" for name, (kind, why) in self.table.items()}
        for name, why in self.declined.items():
            lines[name] += f", reference where {why}"
        return lines

    def report(self) -> str:
        """`describe` in one line. Operations of the same backend stand together."""
        operations: dict[str, list[str]] = {}
        for name, text in self.describe().items():
            operations.setdefault(text, []).append(name)
        if len(operations) == 1:
            return next(iter(operations))
        return "; ".join(f"{text}: {', '.join(names)}" for text, names in operations.items())


_ACTIVE: contextvars.ContextVar[KernelBackend | None] = contextvars.ContextVar("eaglet_kernels", default=None)


def active_backend() -> KernelBackend | None:
    """The backend of the innermost `with backend.active():` block, or None outside of any block."""
    return _ACTIVE.get()


def use_triton(operation: str, x: Tensor, problem: str = "") -> bool:
    """Whether `operation` runs its kernel on x.

    problem: why the kernel cannot do this call, or "". ValueError under 'triton' if there is a problem. Under
    'auto' the problem is noted in `KernelBackend.declined`.
    """
    backend = active_backend()
    if backend is None:
        if triton is None or not x.is_cuda:
            return False
        backend = KernelBackend("auto", "cuda")
    if backend.table[operation][0] == "reference":
        return False
    if x.dtype == torch.float64:
        problem = "the dtype is float64"
    elif not x.is_cuda and not INTERPRETED:
        problem = f"tensors are on '{x.device.type}'"
    if problem and backend.mode == "triton":
        raise ValueError(f"kernels: {operation} has no Triton kernel where {problem}. Use --kernels auto or reference.")
    if problem:
        backend.declined[operation] = problem
    return not problem


def skip_operator(x: Tensor, weight: Tensor | None) -> bool:
    """Whether plain code is called instead of an operator: on a CPU, where torch.compile fuses plain code,
    and where gradients are needed, because operators have no backward."""
    trained = x.requires_grad or (weight is not None and weight.requires_grad)
    return (trained and torch.is_grad_enabled()) or not (x.is_cuda or INTERPRETED)


def native(dtype: torch.dtype) -> bool:
    """Whether kernels use inline PTX and 16-bit matrix products. Under the interpreter, and for float32
    activations, they use portable code with the same results. Kernels know this as the constant NATIVE."""
    return not INTERPRETED and dtype in (torch.float16, torch.bfloat16)


@jit
def dot(a, b, acc, NATIVE: tl.constexpr):
    """a @ b + acc in the dtype of acc. Not NATIVE: in float32, because the interpreter misreads bfloat16."""
    if NATIVE:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        wide = tl.dot(a.to(tl.float32), b.to(tl.float32), acc.to(tl.float32), input_precision="ieee")
        return wide.to(acc.dtype)
