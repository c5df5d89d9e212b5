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
from types import FunctionType, ModuleType


class _Nothing:
    """Stands for the patches of a call within a launch that has made them already."""

    def restore(self) -> None:
        """Leave everything as it is."""


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
            return _Nothing()
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
    """Half the time of small kernels: the type of every intermediate result is built, and compared, anew.

    The facts of a shape are kept, so are NumPy's names of the scalar types, and blocks of one shape fit without a look.
    """
    language, semantic = interpreter.tl, interpreter.TritonSemantic
    block, constexpr = language.block_type, language.constexpr
    begin, broadcast, numpy_type = block.__init__, semantic.broadcast_impl_value, interpreter._get_np_dtype
    shapes, scalars = {}, {}

    def begin_block(self, element_ty, shape) -> None:
        key = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        if key in shapes:
            self.element_ty = element_ty
            self.shape, self.numel, text = shapes[key]
            self.name = f"<{text}, {element_ty}>"
        else:
            begin(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)

    def broadcast_values(self, left, right):
        shape = left.type.shape if isinstance(left.type, block) else None
        fits = isinstance(right.type, block) and shape is right.type.shape
        return (left, right) if fits else broadcast(self, left, right)

    def scalar_type(kind):
        if type(kind) is not language.dtype:  # pointers and blocks
            return numpy_type(kind)
        if kind not in scalars:
            scalars[kind] = numpy_type(kind)
        return scalars[kind]

    block.__init__, semantic.broadcast_impl_value = begin_block, broadcast_values
    interpreter._get_np_dtype = scalar_type


def _products_in_double(numpy: ModuleType) -> None:
    """NumPy's products in float32 give a row other bits in another place, or beside other rows. A GPU's do not."""
    matmul = numpy.matmul

    def exact(a, b, dtype=None):
        return matmul(a.astype(float), b.astype(float)).astype(dtype or numpy.result_type(a, b))

    numpy.matmul = exact


def speed_up() -> None:
    """Make the interpreter of this process two to three times as fast. What it computes stays the same, but for
    products of floats, which are rounded once.

    The overflow checks that go are results that the interpreter throws away: it asserts them only when debugging.
    """
    from triton.runtime import interpreter

    builder, language = interpreter.interpreter_builder, interpreter.tl
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang, (language, language.core))
    _remember_types(interpreter)
    _products_in_double(interpreter.np)


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
