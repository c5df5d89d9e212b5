"""Triton's interpreter without the work that it repeats, and with equal bits for equal rows as on a GPU.

tests/conftest.py uses `speed_up` where TRITON_INTERPRET=1. Two files run such tests, so that two workers share them.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace


class _PatchOnce:
    """Takes the place of `interpreter._patch_lang`, which every call of a device function runs, for 4 ms.

    It replaces the functions of triton.language by those that calculate with NumPy, until the launch ends. The second
    time in a launch it finds nothing to replace. Here it runs once in a launch for each set of modules.
    """

    def __init__(self, patch: Callable, modules: tuple):
        self.patch, self.modules = patch, modules
        self.done: set[frozenset[int]] = set()
        self.seen: dict[int, frozenset[int]] = {}

    def __call__(self, function: FunctionType):
        space = function.__globals__
        if id(space) not in self.seen:
            found = (value for value in space.values() if inspect.ismodule(value))
            self.seen[id(space)] = frozenset(id(value) for value in found if value in self.modules)
        key = self.seen[id(space)]
        if key in self.done:
            return SimpleNamespace(restore=lambda: None)  # this launch has made these patches already
        launch = not self.done
        scope = self.patch(function)
        self.done.add(key)
        if launch:
            restore = scope.restore

            def end() -> None:
                self.done.clear()
                restore()

            scope.restore = end
        return scope


def _remember_types(interpreter: ModuleType) -> None:
    """Most of the time of small kernels: the type of every intermediate result is built, and compared, anew.

    The facts of a shape are kept, so are NumPy's names of the scalar types. Operands of one type and shape fit without a
    look, a value of the wanted type is not looked at, and a number is made a block once for each shape of the other side.
    """
    language, semantic = interpreter.tl, interpreter.TritonSemantic
    block, constexpr, tensor, dtype = language.block_type, language.constexpr, language.tensor, language.dtype
    begin, numpy_type, cast, broadcast, fit, unwrap = (
        block.__init__, interpreter._get_np_dtype, semantic.cast, semantic.broadcast_impl_value,
        semantic.binary_op_type_checking_impl, language.core._unwrap_if_constexpr,
    )  # fmt: skip
    shapes, scalars, joint, common, numbers, plain = {}, {}, {}, {}, {}, {tensor, int, float, bool, type(None)}
    single, equal = (language.core.tuple([]), constexpr(1)), dtype.__eq__

    def begin_block(self, element_ty, shape) -> None:
        # not getattr, which looks among the values of the tuple
        facts = vars(shape).get("facts") if isinstance(shape, language.core.tuple) else None
        if facts is None:
            key = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
            if key not in shapes:
                begin(self, element_ty, shape)
                sizes = language.core.tuple([constexpr(size) for size in self.shape])
                shapes[key] = self.shape, self.numel, str(self.shape), (sizes, constexpr(self.numel))
                self.shape.facts = shapes[key]
            facts = shapes[key]
        self.element_ty = element_ty
        self.shape, self.numel, text, self.of_tensor = facts
        self.name = f"<{text}, {element_ty}>"

    def begin_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if isinstance(type, block) else single

    def scalar_type(kind):
        if type(kind) is not dtype:  # pointers and blocks
            return numpy_type(kind)
        if kind not in scalars:
            scalars[kind] = numpy_type(kind)
        return scalars[kind]

    def broadcast_values(self, left, right):
        if left.shape is right.shape:
            return left, right
        key = id(left.shape), id(right.shape)  # one object stands for a shape
        if key not in joint:
            joint[key] = broadcast(self, left, right)[0].type.shape
        return spread(left, joint[key]), spread(right, joint[key])

    def spread(value, shape):
        if value.shape is shape.facts[3][0]:
            return value
        data = interpreter.np.broadcast_to(value.handle.data, shape)
        return tensor(interpreter.TensorHandle(data, value.dtype), block(value.dtype, shape))

    def operands(self, left, right, *rules, **more):
        known = [type(side) is tensor and type(side.dtype) is dtype for side in (left, right)]  # and no pointers
        given, value = (left, right) if known[0] else (right, left)
        if more or not any(known) or type(value) is tensor and not all(known):
            return fit(self, left, right, *rules, **more)
        if all(known):
            key = left.dtype.name, right.dtype.name, rules
            if key not in common:
                common[key] = fit(self, left, right, *rules)[0].dtype
            return broadcast_values(self, *(semantic.cast(self, side, common[key]) for side in (left, right)))
        key = id(given.shape), given.dtype.name, type(value), value or str(value), rules  # str: there are two zeros
        if key not in numbers:
            numbers[key] = fit(self, given, value, *rules)[1]
        made, given = numbers[key], semantic.cast(self, given, numbers[key].dtype)
        return (given, made) if value is right else (made, given)

    block.__init__, tensor.__init__, semantic.binary_op_type_checking_impl = begin_block, begin_tensor, operands
    semantic.broadcast_impl_value, interpreter._get_np_dtype = broadcast_values, scalar_type
    language.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    semantic.cast = lambda self, value, kind, *more: value if value.dtype is kind else cast(self, value, kind, *more)
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_builtins(interpreter: ModuleType) -> None:
    """Every launch looks up the builtin functions of the language anew, and every call of one goes through two more."""
    found: dict[object, list[tuple[str, Callable]]] = {}

    def calculating(member: Callable) -> Callable:
        inner = getattr(member, "__wrapped__", member)  # without the check that a caller names the semantics

        def call(*args, **named):
            return inner(*args, **{**named, "_semantic": interpreter.interpreter_semantic})

        return call

    def patch(package, builder, scope) -> None:
        if package not in found:
            members = inspect.getmembers(package, interpreter.tl.core.is_builtin)
            found[package] = [(name, calculating(member)) for name, member in members]
        for name, member in found[package]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch


def _products_in_double(numpy: ModuleType) -> None:
    """NumPy's products in float32 give a row other bits in another place, or beside other rows. A GPU's do not."""
    matmul = numpy.matmul

    def exact(a, b, dtype=None):
        return matmul(a.astype(float), b.astype(float)).astype(dtype or numpy.result_type(a, b))

    numpy.matmul = exact


def _merge_two_at_a_time() -> None:
    """Attention loads up to 16 partial sums together, also where a text has one, as in most tests. Bits stay the same."""
    from kernels import attention

    tiles = attention.attention_tiles
    attention.attention_tiles = lambda *facts: tiles(*facts) | {"FLIGHT": 2}


def speed_up() -> None:
    """Make the interpreter of this process three to four times as fast. What it computes stays the same, but for
    products of floats, which are rounded once.

    The overflow checks that go are results that the interpreter throws away: it asserts them only when debugging.
    """
    from triton.runtime import interpreter

    builder, language = interpreter.interpreter_builder, interpreter.tl
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang, (language, language.core))
    _remember_types(interpreter)
    _remember_builtins(interpreter)
    _products_in_double(interpreter.np)
    _merge_two_at_a_time()


def run_interpreted(*files: str) -> None:
    """Run the tests named `test_interpreted_*` of these files in one process, which sets TRITON_INTERPRET=1 in time.

    None of them may fail or be skipped.
    """
    options = ["-q", "-x", "-rs", "-p", "no:cacheprovider", "-k", "test_interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *files]
    folder = Path(__file__).resolve().parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout
