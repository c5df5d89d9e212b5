"""Which implementation every operation uses: a Triton kernel, a C++ kernel for CPUs, or the plain-PyTorch reference."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch
from torch import Tensor

import kernels.cpu as cpu
from kernels.tuned import LinearConfig

try:
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") or "triton" in sys.modules):
        raise ImportError("nothing here would run its kernels, and it takes a quarter of a second")
    import triton
    import triton.language as tl
except ImportError:  # A machine without Triton runs every reference.
    triton = tl = None

jit = triton.jit if triton else (lambda function: function)
constexpr = tl.constexpr if triton else str
constexpr_function = triton.constexpr_function if triton else jit
# Whether TRITON_INTERPRET=1 was set at the start: kernels then run on the CPU, slowly, to be tested.
INTERPRETED = triton is not None and triton.knobs.runtime.interpret

# The compiler option of every kernel whose bits decide a token. A product is fused with a sum only where the kernel says
# so (`tl.fma`). Otherwise a compiler may do it in one variant of a kernel and not in that for another number of rows.
EXACT = {"enable_fp_fusion": False}

MODES = ("auto", "triton", "cpu", "reference")
ACTIVATIONS = ("int8", "float")
OPERATIONS = (
    "packed_linear", "packed_topk", "packed_experts", "tree_attention", "rms_norm", "rope_write_kv", "delta_rule",
    "noise", "choose", "draft_topk", "draft_tree", "commit",  # the small work of a step: one kernel each
)  # fmt: skip
CPU_OPERATIONS = tuple(name for name in OPERATIONS if name != "packed_experts")


@dataclass(frozen=True)
class KernelBackend:
    """Which implementation every operation uses on one device. The choice is made once, on the host.

    mode 'auto' means Triton on CUDA and the reference elsewhere (`LoadOptions.kernel_mode` turns it into 'cpu' where
    that can run). 'triton' and 'reference' mean exactly that.
    'cpu' means the C++ kernels for the operations that have one, and the reference for the others. If 'triton'
    or 'cpu' cannot run at all, creating the backend is a ValueError that says why.

    Pack weights and run steps inside `with backend.active():`. An operator reads the active backend when it
    runs or is captured. Outside of such a block, 'auto' holds for the device of the tensor. If a kernel
    cannot do one call (float64, for example), the call is a ValueError under 'triton'. Under 'auto' the
    reference does it and `declined` says why.
    """

    mode: str = "auto"
    device_type: str = "cpu"
    activations: str = "int8"  # 'float': the C++ kernels do not round those of int4 and int8 weights
    # Measured tilings by `shape_key`. Packing uses them.
    configs: Mapping[str, LinearConfig] = field(compare=False, default_factory=dict)
    # Operation -> ('triton', 'cpu' or 'reference', why).
    table: dict[str, tuple[str, str]] = field(init=False, compare=False)
    # Operation -> why the reference did a call that Triton should have done.
    declined: dict[str, str] = field(init=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"kernels: unknown backend '{self.mode}', use one of {', '.join(MODES)}")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations: {self.activations!r}, use one of {', '.join(ACTIVATIONS)}")
        if self.mode == "reference":
            choice = ("reference", "asked for")
        elif self.mode == "cpu":
            problem = f"the device is '{self.device_type}'" if self.device_type != "cpu" else cpu.problem()
            if problem:
                raise ValueError(f"kernels: the CPU kernels cannot run, because {problem}. Use --kernels auto.")
            choice = ("reference", "the CPU kernels do not have it")
        elif self.mode == "auto" and self.device_type != "cuda":
            why = cpu.problem() if self.device_type == "cpu" else f"'{self.device_type}' has no Triton target"
            choice = ("reference", f"auto: {why or 'neither compiled steps nor other dtypes than float32 use C++'}")
        elif importlib.util.find_spec("triton") is None:
            raise ValueError("kernels: triton is not installed. Use pip install triton or --kernels reference.")
        elif self.device_type != "cuda" and not INTERPRETED:
            what = f"kernels: Triton runs on '{self.device_type}' only under its interpreter."
            raise ValueError(f"{what} Set TRITON_INTERPRET=1 before the start or use --kernels reference.")
        else:
            choice = ("triton", "asked for" if self.mode == "triton" else "auto: the device is CUDA")
        why = "the device is a CPU" + ", float activations" * (self.activations == "float")
        own = dict.fromkeys(CPU_OPERATIONS if self.mode == "cpu" else (), ("cpu", why))
        object.__setattr__(self, "table", dict.fromkeys(OPERATIONS, choice) | own)

    def active(self) -> contextlib.AbstractContextManager[KernelBackend]:
        """Operators that are called inside the block use this backend."""
        return _set(_ACTIVE, self)

    def describe(self) -> dict[str, str]:
        """Operation -> its backend and why, with the reason of a declined call if there was one."""
        lines = {name: f"{kind} ({why})" for name, (kind, why) in self.table.items()}
        for name, why in self.declined.items():
            lines[name] += f", reference where {why}"
        return lines

    def report(self, experts: bool = True, recurrent: bool = True) -> str:
        """`describe` in one line: what most operations use, and what the others use instead.

        experts, recurrent: whether the model has any experts or recurrent layers, and so the operations of those.
        """
        unused = {"packed_experts": not experts, "delta_rule": not recurrent}
        operations: dict[str, list[str]] = {}
        for name, text in self.describe().items():
            if not unused.get(name):
                operations.setdefault(text, []).append(name)
        most = max(operations, key=lambda text: len(operations[text]))
        others = [f"{', '.join(names)}: {text}" for text, names in operations.items() if text != most]
        return "; ".join([most, *others])


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[Any]:
    """Inside the block the variable has another value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_ACTIVE: contextvars.ContextVar[KernelBackend | None] = contextvars.ContextVar("eaglet_kernels", default=None)


def active_backend() -> KernelBackend | None:
    """The backend of the innermost `with backend.active():` block, or None outside of any block."""
    return _ACTIVE.get()


_WATCH: contextvars.ContextVar[Callable[[Operation, list], Any] | None] = contextvars.ContextVar("watch", default=None)


def watched(watch: Callable[[Operation, list], Any] | None) -> contextlib.AbstractContextManager:
    """Inside the block, watch(operation, arguments) makes the calls that Triton would do. It returns their result."""
    return _set(_WATCH, watch)


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
    if backend.table[operation][0] != "triton":
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


def use_cpu(operation: str, *tensors: Tensor, problem: str | None | Callable[[], str | None] = "") -> bool:
    """Whether `operation` runs its C++ kernel on these tensors. They must need no gradient and be float32 or integers.

    problem: why the kernel cannot do this call, or "", or a function that tells. It is noted in `KernelBackend.declined`.
    None: it cannot, which is not noted.
    """
    backend = None if torch.compiler.is_compiling() else active_backend()  # a compiled step never has this backend
    if backend is None or backend.table[operation][0] != "cpu":
        return False
    problem = problem() if callable(problem) else problem
    if problem is not None and any([t.dtype != torch.float32 and t.is_floating_point() for t in tensors]):
        problem = "the dtype is not float32"
    if problem:
        backend.declined[operation] = problem
    return problem == "" and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))


def round_activations() -> bool:
    """Whether the C++ kernels round the activations of int4 and int8 weights."""
    backend = active_backend()
    return backend is None or backend.activations == "int8"


def _no_problem(*_args) -> str:
    return ""


@dataclass(eq=False)
class Operation:
    """What the backend makes a difference for: the one place that decides which implementation does a call.

    A call runs the C++ kernel if the active backend wants it. Otherwise plain code runs on a CPU, where torch.compile
    fuses it, and where gradients are needed, because operators have no backward. Everywhere else the call is one of
    the torch operator `torch.ops.eaglet.NAME`, into which torch.compile does not look. When this runs or is captured,
    it runs the Triton kernel, or the reference if the backend or the kernel does not want the call.

    All functions below take the arguments of the reference, which are positional. Arguments that are named tuples of
    tensors are lists of tensors in the operator, and so is a result.
    """

    reference: Callable  # plain PyTorch
    name: str  # of the operator
    key: str  # in `KernelBackend.table`; operations may share one
    launch: Callable  # launch(out, ...) has Triton write the outputs `out`, or returns others
    shapes: Callable  # empty outputs
    cpu: Callable | None = None  # calls the C++ kernel
    cpu_problem: Callable[..., str | None] = _no_problem  # as `use_cpu` takes it
    problem: Callable[..., str] = _no_problem  # why Triton cannot do a call, or ""
    mutates: Sequence[str] = ()  # the arguments that are written
    at: tuple[int, ...] = (0,)  # the arguments whose dtypes, device and gradients decide
    plain: Callable[..., bool] | bool = True  # whether the reference may take the place of the operator
    copies: bool = False  # whether the reference returns views, which an operator may not

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.reference)
        signature = inspect.signature(self.reference, eval_str=True)
        kinds = [p.annotation for p in signature.parameters.values()]
        self.records = {i: kind for i, kind in enumerate(kinds) if _is_record(kind)}
        result = signature.return_annotation
        self.result = result if _is_record(result) else None
        self.defaults = [p.default for p in signature.parameters.values()]
        self.written = [i for i, name in enumerate(signature.parameters) if name in self.mutates]
        self.operator = self._register(signature)

    def __call__(self, *args):
        if len(args) < len(self.defaults):
            args = (*args, *self.defaults[len(args) :])
        tensors = [args[i] for i in self.at]
        if self._in_cpp(args, tensors):
            out = self.cpu(*args)
        elif _without_operator(tensors) and (self.plain if isinstance(self.plain, bool) else self.plain(*args)):
            return self.reference(*args)
        else:
            out = self.operator(*args)
        return out if self.result is None else self.result(*out)

    def outside(self, *args):
        """A call that only C++ and plain code can do."""
        tensors = [args[i] for i in self.at]
        return self.cpu(*args) if self._in_cpp(args, tensors) else self.reference(*args)

    def _in_cpp(self, args: Sequence, tensors: Sequence[Tensor]) -> bool:
        return self.cpu is not None and use_cpu(self.key, *tensors, problem=functools.partial(self.cpu_problem, *args))

    def triton(self, *args):
        """What the operator gives where the kernels of Triton do the call."""
        out = self.shapes(*args)
        made = self.launch(out, *args)
        return out if made is None else made

    def _run(self, *args):
        """What the operator does."""
        args = self._named(args)
        if use_triton(self.key, args[self.at[0]], self.problem(*args)):
            watch = _WATCH.get()
            out = self.triton(*args) if watch is None else watch(self, args)
            return out if out is None or isinstance(out, Tensor) else tuple(out)
        return self.by_reference(*args)

    def by_reference(self, *args):
        """What the operator gives where the reference does the call. The arguments are those of the reference."""
        out = self.reference(*args)
        if self.copies:
            out = [t.clone(memory_format=torch.contiguous_format) for t in out if t is not None]
        return out if out is None or isinstance(out, Tensor) else tuple(out)

    def _named(self, args: Sequence) -> list:
        return [self.records[i](*value) if i in self.records else value for i, value in enumerate(args)]

    def _register(self, signature: inspect.Signature) -> Callable:
        """Define the operator. It has no defaults, because it would not hand on arguments that equal them."""

        def declared():
            pass

        parameters = [
            p.replace(default=p.empty, annotation=_list_type(self.records[i]) if i in self.records else p.annotation)
            for i, p in enumerate(signature.parameters.values())
        ]
        declared.__signature__ = signature.replace(parameters=parameters)
        if self.result is not None:
            returns = tuple[(Tensor,) * (len(self.result._fields) - len(self.result._field_defaults))]
            declared.__signature__ = declared.__signature__.replace(return_annotation=returns)
        schema = torch.library.infer_schema(declared, mutates_args=self.mutates)

        def fake(*args):
            return self.shapes(*self._named(args))

        return define_operator(self.name, fake, schema)(self._run)


_LIBRARY = torch.library.Library("eaglet", "FRAGMENT")  # its registrations live as long as this object


def define_operator(name: str, fake: Callable, schema: str = "") -> Callable[[Callable], torch._ops.OpOverload]:
    """A decorator: the function becomes the operator `torch.ops.eaglet.NAME`, into which torch.compile does not look.

    As `torch.library.custom_op`, whose first call imports torch's compiler, for a second, and which adds 20 us to every
    call on a CPU. fake: gives empty outputs. schema: that of the function if none is given; then it writes nothing.
    """

    def define(function: Callable) -> torch._ops.OpOverload:
        _LIBRARY.define(name + (schema or torch.library.infer_schema(function, mutates_args=())))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"eaglet::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.eaglet, name).default

    return define


def operation(name: str, key: str, launch: Callable, shapes: Callable, **more) -> Callable[[Callable], Operation]:
    """A decorator: the function is the reference of an `Operation`, whose other fields are the arguments."""
    return lambda reference: Operation(reference, name, key, launch, shapes, **more)


def _is_record(kind: object) -> bool:
    """Whether an annotation is a named tuple of tensors."""
    return isinstance(kind, type) and issubclass(kind, tuple)


def _list_type(record: type) -> type:
    """The type of a list of a record's tensors."""
    optional = any(kind is not Tensor for kind in get_type_hints(record).values())
    return list[Tensor | None] if optional else list[Tensor]


def _without_operator(tensors: Sequence[Tensor]) -> bool:
    trained = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    return trained or not (tensors[0].is_cuda or INTERPRETED)


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
