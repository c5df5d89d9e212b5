"""package/: the wheel that `pip install .` makes, the command `eaglet`, and `import eaglet` in another folder."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import generate
from loading.options import DEMO, LoadOptions
from package import __main__ as command
from package import backend

ROOT = Path(__file__).resolve().parent.parent
INFO = f"eaglet_decoder-{generate.VERSION}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built offline."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*pip, str(folder), str(ROOT)], check=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder in which the wheel is installed, as in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(folder), str(wheel)], check=True)
    return folder


def python(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that is not the repository, with the installed package."""
    environment = os.environ | {"PYTHONPATH": str(installed), "MYPYPATH": str(installed), "OMP_NUM_THREADS": "1"}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *arguments], **how)


def test_the_wheel_has_one_package(wheel):
    """A module called `model` or `generate` in everybody's site-packages, and a file of the engine that is left out."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0] for name in names} == {"eaglet", INFO}
    assert wheel.name == f"eaglet_decoder-{generate.VERSION}-py3-none-any.whl"
    needed = {"__init__.py", "__main__.py", "py.typed", "engine/load.py", "model.py", "demo/config.json"}
    kept = "kernels/*.cpp kernels/*.h cli/*.html cli/*.js cli/*.css serving/*.html serving/*.js serving/*.css".split()
    needed |= {str(path.relative_to(ROOT)) for what in (*kept, "serving/vendor/*") for path in ROOT.glob(what)}
    assert len(needed) > 25 and {f"eaglet/{name}" for name in needed} <= set(names)
    rooms = {path.relative_to(ROOT).as_posix() for room in backend.rooms() for path in (ROOT / room).glob("*.py")}
    missing = {f"eaglet/{name}" for name in rooms} - set(names)
    assert {Path(name).stem for name in missing} == backend.IN_THE_REPOSITORY


def test_no_file_of_the_wheel_imports_a_bare_room(wheel):
    """An import that the rewriting did not find, which fails after installing and never in the repository."""
    rooms = backend.rooms()
    with zipfile.ZipFile(wheel) as file:
        sources = {name: file.read(name).decode() for name in file.namelist() if name.endswith(".py")}
    assert len(sources) > 80
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {module.partition(".")[0] for module in found} & rooms, f"{name}:{node.lineno}"
            for module in (module for module in found if module.startswith("eaglet.")):
                path = module.replace(".", "/")
                assert f"{path}.py" in sources or f"{path}/__init__.py" in sources, f"{name}: {module}"


@pytest.mark.parametrize("source, expected", [
    ("import model", "import eaglet.model as model"),
    ("import kernels.cpu as cpu", "import eaglet.kernels.cpu as cpu"),
    ("from kernels.cpu import (\n    a,\n)", "from eaglet.kernels.cpu import (\n    a,\n)"),
    ("from engine.load import load as f", "from eaglet.engine.load import load as f"),
    ("def f():\n    'é'\n    from model import x", "def f():\n    'é'\n    from eaglet.model import x"),
    ("'It takes what it reads\nfrom model and goes on.'", "'It takes what it reads\nfrom model and goes on.'"),
    ("import models\nfrom modeling import model", "import models\nfrom modeling import model"),
    ("model = x.model  # import model", "model = x.model  # import model"),
    ("'import model'", "'import model'"),
    ("s = f'python -m scripts.tune_tree {x}'", "s = f'python -m eaglet.scripts.tune_tree {x}'"),
    ("'''a\nRun python generate.py -p x'''", "'''a\nRun eaglet generate -p x'''"),
])  # fmt: skip
def test_imports_and_commands_are_rewritten_where_they_stand(source, expected):
    """A rewriting that misses a form of import, or changes a name or a comment that is no import."""
    assert backend.rewritten(source, {"model", "kernels", "engine", "generate"}) == expected


def test_the_installed_package_decodes_in_another_folder(installed, tmp_path):
    """A data file or an import that is found in the repository only, such as `demo/eagle3`, `import model` that works
    after installing, a Path that is refused, and an error that does not say where the files are. A folder of the user
    comes first."""
    program = """
import importlib.util, sys
from pathlib import Path
import eaglet
assert "torch" not in sys.modules, "import eaglet takes seconds"
engine = eaglet.load("demo", eagle=Path("demo/eagle3"), device="cpu")
assert eaglet.load is eaglet.load and isinstance(engine, eaglet.Engine) and callable(eaglet.json_grammar)
result = engine.generate("def main():\\n", eaglet.SamplingParams(max_new_tokens=8)).run()[0]
assert len(result.token_ids) == 8 and result.text and engine.head.config.version == 3
assert eaglet.load(eagle=str(eaglet.DEMO / "eagle1"), device="cpu").head.config.version == 1
assert not [name for name in ("model", "generate", "engine", "loading") if importlib.util.find_spec(name)]
def fails(call):
    try:
        call()
    except (AttributeError, ValueError) as error:
        print(error)
fails(lambda: eaglet.laod)
for wrong in ("demo/eagle9", Path("heads/none")):
    fails(lambda: eaglet.load(eagle=wrong, device="cpu"))
Path("demo").mkdir()
fails(lambda: eaglet.load("demo"))
print(eaglet.__version__)
"""
    done = python(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    name, one, two, own, version = done.stdout.splitlines()
    assert name.startswith("eaglet has no 'laod'; it has DEMO, Engine") and version == generate.VERSION
    assert one.startswith("demo/eagle9 is no path here, and not in ") and "eaglet.DEMO" in one
    assert two.startswith("heads/none is no path here") and own.startswith("demo/config.json")


def test_the_wheel_needs_what_the_repository_needs(wheel):
    """A distribution with the name of somebody else's, torch pinned to one release, a dependency in requirements.txt that
    `pip install .` does not bring, and a page that names a package which is not ours."""
    with zipfile.ZipFile(wheel) as file:
        about = file.read(f"{INFO}/METADATA").decode()
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    torch, *others = [line for line in lines if line and not line.startswith("pytest")]
    assert "\nName: eaglet-decoder\n" in about and torch.startswith("torch==2.")
    needs = ["torch>=2.11,<3", *others, "ray>=2.60; extra == 'replicas'"]
    assert re.findall("^Requires-Dist: (.*)$", about, re.M) == needs
    assert "\nProvides-Extra: replicas\n" in about and "\nray>=2.60 " in (ROOT / "requirements-dev.txt").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", generate.VERSION)
    assert DEMO.is_dir() and LoadOptions().checkpoint == str(DEMO)
    code = [path for room in backend.rooms() for path in ROOT.glob(f"{room}/*.py")]
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *code]:
        assert not re.search(r"pip install \W?eaglet", page.read_text(encoding="utf-8")), page


def test_the_installed_command_explains_itself(installed, tmp_path):
    """A command that needs the repository, or seconds for its help; `python -m eaglet`, for who has no folder of commands
    on the path."""
    program = "import sys; from eaglet.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    eaglet = str(installed / "bin" / "eaglet")
    for words in (["-c", program], ["-m", "eaglet", "--help"]):
        done = python(installed, tmp_path, *words)
        assert done.returncode == 0 and all(f"eaglet {name} " in done.stdout for name in command.COMMANDS), done.stderr
    for name, said in (("serve", "    eaglet serve  "), ("generate", "usage: eaglet generate")):
        done = python(installed, tmp_path, eaglet, name, "--help")
        assert done.returncode == 0 and said in done.stdout and "python generate.py" not in done.stdout


def test_the_installed_command_decodes_in_two_processes(installed, tmp_path, capsys):
    """`eaglet generate --tp 2` in another folder gives the text of the command in one process."""
    words = ["generate", "-p", "def main():", "--max-new-tokens", "8", "--device", "cpu", "--threads", "1", "-q"]
    two = python(installed, tmp_path, str(installed / "bin" / "eaglet"), *words, "--tp", "2")
    assert two.returncode == 0, two.stderr
    assert generate.main(words[1:]) == 0
    text = capsys.readouterr().out
    assert text.strip() and two.stdout == text


def test_commands_run_what_they_name(monkeypatch, capsys):
    """`eaglet chat` that decodes once, an argument that gets lost on its way, and a traceback, or a help text of fifty
    lines, for a misspelt command."""
    called = []
    monkeypatch.setattr(sys, "argv", ["eaglet"])
    monkeypatch.setattr(generate, "main", lambda argv: called.append(argv) or 0)
    assert command.main(["chat", "--checkpoint", "x"]) == 0 == command.main(["generate", "-p", "y"])
    assert called == [["--chat", "--checkpoint", "x"], ["-p", "y"]]
    assert command.main(["generat"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error  'generat' is no command; there are generate, chat,") and error.count("\n") == 1


# ------------------------------------------------------------------ types

USE = """
import asyncio

import eaglet


def main() -> None:
    engine: eaglet.Engine = eaglet.load("demo", eagle=eaglet.DEMO / "eagle1", report=print, tree=("a", "b"), quant="int8")
    params = eaglet.SamplingParams(temperature=1.0, seed=7, stop=("end",))
    with engine.generate("text", params) as stream:
        for chunk in stream:
            print(chunk.text, chunk.token_ids[0] + 1)
        print(stream.result.tau + 1.0, stream.result.token_ids)
    results = engine.generate_batch([[1, 2], "text"]).run()
    print(results[0].text.upper(), eaglet.__version__, eaglet.DEMO / "eagle1")
    engine.warm_up(params)


async def later(engine: eaglet.Engine) -> str:
    async for chunk in engine.agenerate([1, 2, 3]):
        print(chunk.text)
    return (await engine.agenerate("text").run())[0].text


asyncio.run(later(eaglet.load()))
"""
WRONG = (
    ("eagle=eaglet", "eagel=eaglet", 'Unexpected keyword argument "eagel" for "load"'),
    ('quant="int8"', 'ctx="2048"', 'Argument "ctx" to "load" has incompatible type "str"'),
    ('load("demo",', 'load("demo", None,', 'Too many positional arguments for "load"'),
    ("temperature=", "temprature=", 'Unexpected keyword argument "temprature"'),
    ("eaglet.load()", "eaglet.laod()", 'Module has no attribute "laod"'),
    ("chunk.token_ids", "chunk.tokens", '"Chunk" has no attribute "tokens"'),
)


def test_a_type_checker_knows_the_public_names(installed, tmp_path):
    """A misspelt option of `load` that nobody notices before it runs, and a public name without a type.

    torch's own types are left out, because reading them takes a minute.
    """
    pytest.importorskip("mypy", reason="mypy is not installed (requirements-dev.txt)")
    files = {"right.py": USE} | {f"wrong{i}.py": USE.replace(old, new) for i, (old, new, _) in enumerate(WRONG)}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flags = ["--strict", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    done = python(installed, tmp_path, "-m", "mypy", *flags, *files)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for i, (_, _, message) in enumerate(WRONG):
        assert [line for line in errors if line.startswith(f"wrong{i}.py:") and message in line], (message, errors)


def test_a_misspelt_option_is_one_line():
    """A TypeError about a constructor that the user never called."""
    with pytest.raises(TypeError, match="load has no option 'eagel'; did you mean 'eagle'"):
        generate.load(eagel="demo/eagle1")
    with pytest.raises(TypeError, match="load has no option 'xyzzy'; allowed: sha256, slots, ctx"):
        generate.load(xyzzy=1)
