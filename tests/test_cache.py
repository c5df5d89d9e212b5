"""support/cache.py: compiled code is found again by the next process, and clearing deletes nothing that is not ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_tree import files_run

import generate
from decoding.params import SamplingParams
from generate import load
from support import cache, native
from support.errors import BadFileError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def own_cache(empty_cache, monkeypatch):
    for name in cache.VARIABLES:
        monkeypatch.setenv(name, "restored after the test")
        os.environ.pop(name)


def filled() -> Path:
    folder, _ = cache.use("a CPU, 4 threads")
    (folder / "inductor").mkdir()
    (folder / "inductor" / "code.so").write_bytes(b"x" * 1000)
    return folder


def test_folder_is_keyed_by_versions_device_and_source(tmp_path, monkeypatch):
    """The folder's name has the versions of torch and triton, the device, and a digest of our sources. A folder that the
    user chose stays; torch's own default in /tmp does not count as chosen."""
    folder, found = cache.use("a CPU, 4 threads")
    assert found == "new" and folder.parent == cache.root() and "a_CPU_4_threads" in folder.name
    assert cache.use("a CPU, 4 threads") == (folder, "found")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert cache.use("NVIDIA X")[0] != folder
    for chosen, state in (
        (str(tmp_path / "mine"), "set by $TORCHINDUCTOR_CACHE_DIR"),
        ("/tmp/torchinductor_x", "found"),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
        place, found = cache.use("NVIDIA X")
        assert found == state and (place == Path(chosen)) == (state != "found")
        assert (os.environ["TORCHINDUCTOR_CACHE_DIR"] == chosen) == (state != "found")
    assert len(cache.entries()) == 2
    monkeypatch.setattr(cache, "version", lambda package: "99.0")
    assert cache.use("a CPU, 4 threads")[0] != folder


def test_source_changes_the_key(tmp_path, monkeypatch):
    """An edit of a file that is traced changes the key, also in a folder; an edit of a report's wording does not."""
    monkeypatch.setattr(cache, "SOURCES", tmp_path)
    for name in ("model.py", "kernels/__init__.py", "kernels/linear.py", "cli/__init__.py", "notes/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    keys = [cache.key("cpu")]
    for name in ("model.py", "kernels/linear.py", "kernels/new.py", "new.py"):
        (tmp_path / name).write_text("b = 1")
        keys.append(cache.key("cpu"))
    (tmp_path / "new.py").rename(tmp_path / "kernels" / "newer.py")
    keys.append(cache.key("cpu"))
    assert len(set(keys)) == len(keys)
    for name in ("cli/report.py", "notes/a.py"):
        (tmp_path / name).write_text("c = 1")
    assert cache.key("cpu") == keys[-1]


def test_all_that_a_compiled_step_runs_is_in_the_key(tmp_path, monkeypatch):
    """Every file that a compiled step runs is part of the digest."""
    engine = load(eagle=str(ROOT / "demo" / "eagle1"), tree="dynamic:8,2,3", ngram_nodes=3, ctx=64)
    stream = engine.generate([1, 2, 3], SamplingParams(temperature=1.0, max_new_tokens=3))
    ran = {Path(name).relative_to(ROOT) for name in files_run(stream.run) if Path(name).is_relative_to(ROOT)}
    used = {path.as_posix() for path in ran if not {"tests", ".venv"} & set(path.parts)}
    assert {"decoding/step.py", "model.py", "kernels/growing.py", "drafters/trees.py", "drafters/ngram.py"} <= used
    assert used <= {path.relative_to(ROOT).as_posix() for path in cache._traced_sources()}


def test_show_and_clear(capsys, tmp_path):
    """Entries are listed with their sizes, and clearing deletes the compiled code but not the tuned trees."""
    folder = filled()
    tree = tmp_path / "cache" / "trees" / "tuned.json"
    tree.parent.mkdir()
    tree.write_text("{}")
    assert generate.main(["--cache", "show"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder.name}  1 files  0.0 MB" in shown and "1 entries" in shown
    assert generate.main(["--cache", "clear"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert not folder.exists() and tree.exists() and cache.entries() == []
    assert generate.main(["--cache", "clear"]) == 0


@pytest.mark.parametrize("damage", ["no marker", "a file", "a folder", "a link"])
def test_clear_refuses_what_is_not_ours(damage, tmp_path, capsys):
    """A folder without our marker, with strange files, or behind a link is refused and stays whole."""
    folder = filled()
    root = cache.root()
    if damage == "no marker":
        (root / cache.MARKER).unlink()
    elif damage == "a file":
        (root / "thesis.tex").write_text("years of work")
    elif damage == "a folder":
        (root / "photos").mkdir()
    else:
        root.rename(tmp_path / "elsewhere")
        root.symlink_to(tmp_path / "elsewhere")
    assert generate.main(["--cache", "clear"]) != 0
    assert "is not cleared" in capsys.readouterr().err
    assert (folder / "inductor" / "code.so").exists()


@pytest.mark.slow
def test_second_process_reuses_what_the_first_compiled():
    """A second process compiles nothing anew."""
    words = "generate.py --compile --kernels reference --json -p x --max-new-tokens 3 --device cpu"
    command = [sys.executable, *words.split()]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
        runs.append(json.loads(done.stdout))
    first, second = runs
    assert [entry.bytes > 10_000 for entry in cache.entries()] == [True], "kept in our folder, nowhere else"
    assert first["graphs_compiled"] > 0 and first["graphs_reused"] == 0
    assert second["graphs_reused"] == first["graphs_compiled"] and second["graphs_compiled"] == 0
    assert second["token_ids"] == first["token_ids"]


# ---- what is kept and checked


def test_an_entry_is_kept_whole_and_read_back(tmp_path):
    """Payload and values come back as they were, the values also without the payload, and nothing else is left behind."""
    path = tmp_path / "folder" / "entry"
    assert cache.fetch(path) is None
    kept = ((b"", {"a": [1, "é"]}), (bytes(range(256)) * 100, None), (memoryview(b"abc"), {"ids": [1, 2]}))
    for payload, about in kept:
        cache.store(path, payload, about, 0o600)
        assert cache.fetch(path) == cache.read(path) == (about or {}, bytes(payload))
        assert cache.fetch(path, payload=False) == (about or {}, b"")
    assert [entry.name for entry in path.parent.iterdir()] == ["entry"] and path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_entry_is_refused_and_dropped(tmp_path):
    """Every changed byte and every cut is noticed. `read` says so in one line, and `fetch` deletes the file. What cannot
    be read is not what is damaged: it stays."""
    path = tmp_path / "entry"
    cache.store(path, b"payload " * 9, {"ids": [1, 2, 3]})
    good = path.read_bytes()
    bad = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    bad += [good[:i] for i in range(len(good))] + [good + b"x", b"{}", os.urandom(300)]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(BadFileError, match="^[^\n]*entry: damaged[^\n]*Delete it.$"):
            cache.read(path)
        assert cache.fetch(path) is None and not path.exists()
    cache.store(path, b"again")
    assert cache.read(path).payload == b"again"
    assert cache.fetch(tmp_path) is None and tmp_path.is_dir()


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    """A library in the cache is used only if it has the bytes that the compiler wrote."""
    compiled = []

    def compile_library(sources, target, *rest):
        compiled.append(target)
        target.write_bytes(b"machine code")

    monkeypatch.setattr(native, "compile_library", compile_library)
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "own"))
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    library = native.build([source], [])
    assert native.build([source], []) == library and len(compiled) == 1
    for damage in (b"machine cod", b"machine cope", b""):
        library.write_bytes(damage)
        assert native.build([source], []).read_bytes() == b"machine code"
    library.with_name(f"{library.name}.seal").write_bytes(b"")
    native.build([source], [])
    assert len(compiled) == 5
