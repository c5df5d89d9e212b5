"""The house order (DESIGN.md section 2): who may import whom, and how large the core may grow."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = (
    "artefacts kernels trees tree sampling tokenizer model_config model quantize checkpoint eagle_draft drafters runner "
    "regions results engine viewer generate"
).split()
ALONE = {"artefacts", "kernels", "trees", "sampling", "tokenizer", "model_config", "runner"}
CORE = sorted(ROOT.glob("*.py"))
# What we write ourselves whatever libraries exist. Around it: file formats, tokenizers, quantizing, the command line.
HEART = ("kernels", "trees", "sampling", "model_config", "model", "eagle_draft", "runner", "engine")
LIMIT = 3000


def imports(path: Path, module_level: bool) -> set[str]:
    """Top names of the modules a file imports: outside functions only, or anywhere."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name.split(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path.name}: relative import in a flat layout"
                found.add((child.module or "").split(".")[0])
            if not (module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def code_lines(path: Path) -> int:
    """Lines that hold code: not blank, not a comment, not a docstring."""
    source = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_a_file_imports_only_files_above_it(path):
    """A cycle, or a layer that reaches up: the model that knows the loop, the loop that knows HTTP."""
    assert path.stem in ORDER, f"{path.name} has no place in the order of DESIGN.md section 2"
    ours = imports(path, module_level=True) & set(ORDER)
    allowed = set() if path.stem in ALONE else set(ORDER[: ORDER.index(path.stem)])
    assert ours <= allowed, f"{path.name} may not import {sorted(ours - allowed)}"
    if path.stem in ALONE:
        assert not imports(path, module_level=False) & set(ORDER)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_does_not_know_scripts_or_tests(path):
    """Serving, training or benchmarks needed by the engine, also inside a function."""
    assert not imports(path, module_level=False) & {"scripts", "tests", "conftest", "transformers"}


def test_every_file_of_the_core_is_small_together():
    """A core that nobody reads any more."""
    sizes = {path.name: code_lines(path) for path in CORE if path.stem in HEART}
    assert sum(sizes.values()) < LIMIT, sizes


def test_nothing_happens_at_import():
    """Work, output or global state while importing: every top-level statement defines something."""
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.If,
        ast.Try,
    )
    for path in CORE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            grown = isinstance(node, ast.AugAssign)  # a constant written in two lines
            assert docstring or grown or isinstance(node, allowed), f"{path.name}:{node.lineno}"
