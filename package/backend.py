"""Builds the wheel for `pip install .` (a PEP 517 backend). It needs nothing but Python.

The files of the repository import each other by bare names such as `model`. These names would be in everybody's way in
site-packages. So the wheel has one package `eaglet` with all rooms in it, and imports of rooms name that package.
"""

import base64
import hashlib
import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "eaglet"
NOT_SHIPPED = {"tests", "package"}  # of package/, SHIPPED_HERE goes into the package itself
SHIPPED_HERE = ("__init__.py", "__main__.py")
DATA = ("demo", "heads")  # folders without code
IN_THE_REPOSITORY = {"demo", "gpu", "measured", "train_demo"}  # scripts that need its other files
LEFT_OUT = {".pyc", ".tmp", ".partial"}
# What the texts of the program call things -> what they are called after installing.
CALLED = {
    "python generate.py": "eaglet generate",
    "python quantize.py": "eaglet quantize",
    "python -m scripts.bench ": "eaglet bench ",
    "python -m scripts.train_eagle ": "eaglet train ",
    "python -m scripts.serve": "eaglet serve",
    "python -m scripts.": "python -m eaglet.scripts.",
    "python -m {name}": "python -m eaglet.{name}",
    "from generate import load": "from eaglet import load",
}


def rooms() -> set[str]:
    """The names that files of the repository import from each other."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_SHIPPED
    return folders | {path.stem for path in ROOT.glob("*.py")}


def rewritten(source: str, names: set[str]) -> str:
    """A source whose imports of `names` go into the package, and whose texts call commands by their installed names.

    An import of a room stands on a line of its own: `import a`, `import a.b as c`, `from a.b import c`.
    """
    room = f"({'|'.join(sorted(names))})"
    source = re.sub(rf"^( *import ){room}$", r"\1\2 as \2", source, flags=re.MULTILINE)
    imports = re.compile(rf"^( *(?:from|import) ){room}(?=(?:\.\w+)* (?:as|import) )", re.MULTILINE)
    source = imports.sub(lambda found: f"{found[1]}{PACKAGE}.{found[2]}", source)
    for text, called in CALLED.items():
        source = source.replace(text, called)
    return source


def contents() -> Iterator[tuple[str, bytes]]:
    """The files of the package, by their names in the wheel."""
    names = rooms()
    files = [ROOT / "package" / name for name in SHIPPED_HERE] + sorted(ROOT.glob("*.py"))
    for folder in sorted(names | set(DATA)):
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in LEFT_OUT)
    for path in files:
        if path.parent.name == "scripts" and path.stem in IN_THE_REPOSITORY:
            continue
        inside = path.relative_to(ROOT / "package" if path.parent.name == "package" else ROOT)
        data = path.read_bytes()
        data = rewritten(data.decode(), names).encode() if path.suffix == ".py" else data
        yield f"{PACKAGE}/{inside.as_posix()}", data
    yield f"{PACKAGE}/py.typed", b""


def version() -> str:
    """The version, which `generate.py` holds."""
    return re.search(r'^VERSION = "(.+)"$', (ROOT / "generate.py").read_text(encoding="utf-8"), re.MULTILINE)[1]


def _about(project: dict) -> dict[str, bytes]:
    """The files of the wheel's dist-info folder, except RECORD."""
    extras = project["optional-dependencies"]
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version()}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
        *(f"Provides-Extra: {extra}" for extra in extras),
        *(f"Requires-Dist: {needed}; extra == '{extra}'" for extra, all_of in extras.items() for needed in all_of),
        "Description-Content-Type: text/markdown",
        "",
        (ROOT / project["readme"]).read_text(encoding="utf-8"),
    ]
    wheel = ["Wheel-Version: 1.0", f"Generator: {PACKAGE}", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
    scripts = ["[console_scripts]", *(f"{name} = {target}" for name, target in project["scripts"].items()), ""]
    texts = {"METADATA": metadata, "WHEEL": wheel, "entry_points.txt": scripts}
    files = {name: "\n".join(lines).encode() for name, lines in texts.items()}
    return files | {"licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Write the wheel into a folder and return its name. pip calls this."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stem = f"{project['name'].replace('-', '_')}-{version()}"
    files = dict(contents()) | {f"{stem}.dist-info/{name}": data for name, data in _about(project).items()}
    record = ""
    with zipfile.ZipFile(Path(wheel_directory) / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record += f"{name},sha256={digest},{len(data)}\n"
        wheel.writestr(f"{stem}.dist-info/RECORD", f"{record}{stem}.dist-info/RECORD,,\n")
    return f"{stem}-py3-none-any.whl"
