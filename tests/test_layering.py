"""The house order: a file imports only rooms above its own, at every level, and no file does work when it is imported."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A room is a file at the top or a folder. It may import the rooms before it. docs/extending.md says what each one owns.
ORDER = (
    "support kernels tree families text model layers weights decoding drafters eagle_draft loading engine "
    "cli serving generate quantize bench training scripts package"
).split()
APART = {"bench": {"training", "generate", "quantize"}, "training": {"bench", "generate", "quantize"}}
NOT_OURS = {"tests", "results", "demo", "docs", ".venv"}
FILES = sorted(p for p in ROOT.rglob("*.py") if not NOT_OURS & set(p.relative_to(ROOT).parts))


def module_of(path: Path) -> str:
    """The dotted name of a file of the project."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(source: str) -> set[str]:
    """Dotted names that a source imports at any level, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def room(name: str) -> str:
    return name.split(".")[0]


def upward(name: str, source: str) -> set[str]:
    """The rooms that a module imports although the order does not allow it."""
    own = room(name)
    rooms = {room(other) for other in imported(source)} & set(ORDER) - {own}
    allowed = set(ORDER[: ORDER.index(own)]) - APART.get(own, set())
    return rooms - allowed


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that reach themselves, in a circle. [] if there are none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of `sources` that it imports, the longest known name of each import."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        graph[name] = set()
        for other in imported(source):
            while other and other not in sources:
                other = other.rpartition(".")[0]
            graph[name] |= {other} - {"", name}
    return graph


SOURCES = {module_of(path): path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_imports_only_rooms_above_it(name):
    """A layer that reaches up: the model that knows the loop, the loop that knows HTTP, also inside a function; a module
    up to the engine that imports a test helper or the library that it is compared with; a command that is a library."""
    assert room(name) in ORDER, f"{name} has no place in the order of docs/extending.md"
    assert not upward(name, SOURCES[name])
    others = imported(SOURCES[name])
    if ORDER.index(room(name)) < ORDER.index("cli"):
        assert not {room(other) for other in others} & {"tests", "conftest", "transformers"}
    assert not [other for other in others & SOURCES.keys() if room(other) == "scripts" and other != "scripts"]


def test_an_import_upward_inside_a_function_is_caught():
    """A layering test that looks at the top of the file only."""
    lines = "import engine", "from bench.arms import Arm", "from loading import options as _o"
    mutant = SOURCES["drafters.ngram"] + "\n\ndef f():\n    def inner():\n        " + "\n        ".join(lines)
    assert upward("drafters.ngram", mutant) == {"engine", "bench", "loading"}


def test_there_are_no_circles():
    """Two files of one folder that import each other, which the order of the rooms allows."""
    assert circle(graph_of(SOURCES)) == []
    mutant = SOURCES | {"weights.files": SOURCES["weights.files"] + "\n\ndef f():\n    import weights.hf\n"}
    assert {"weights.files", "weights.hf"} <= set(circle(graph_of(mutant)))


def test_nothing_happens_at_import():
    """Work, output or global state while importing: every top-level statement of the core defines something."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    allowed = (ast.Import, ast.ImportFrom, ast.If, ast.Try, *defined)
    for name, source in SOURCES.items():
        for node in ast.parse(source).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            grown = isinstance(node, ast.AugAssign)  # a constant that is written in two statements
            assert docstring or grown or isinstance(node, allowed), f"{name}:{node.lineno}"
