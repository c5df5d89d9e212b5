"""support/: how commands end, and files that are whole or not there at all."""

import gc
import io
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import Terminal
from tiny import one_line as refused

from support import errors, files, machine
from support.errors import BAD_FILE, INTERNAL, MEMORY, USAGE, BadFileError, UsageError, bad_files, one_line, run_command
from support.machine import freed_memory_returns, zeros
from support.progress import Progress
from support.startup import without_collector

ROOT = Path(__file__).resolve().parent.parent


def raising(error: BaseException):
    """The body of a command that ends with this error."""

    def body():
        raise error

    return body


def noted(error: BaseException, *notes: str) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


# ------------------------------------------------------------------ how a command ends

ENDS = {
    "usage": (UsageError("--x is 1"), USAGE, "error  --x is 1"),
    "a bad file": (BadFileError("f: cut off"), BAD_FILE, "error  f: cut off"),
    "a plan that does not fit": (errors.NotEnoughMemory("needs 9 GB"), MEMORY, "error  needs 9 GB"),
    "another user error": (errors.UserError("no"), USAGE, "error  no"),
    "wrong input": (ValueError("top_p is 2"), USAGE, "error  top_p is 2"),
    "wrong text": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), USAGE, "error  'utf-8' codec"),
    "no such file": (FileNotFoundError(2, "No such file", "x.html"), BAD_FILE, "error  x.html: No such file"),
    "a full disk": (OSError(28, "No space left on device"), BAD_FILE, "error  [Errno 28] No space left on device"),
    "Python's memory": (MemoryError(), MEMORY, "error  MemoryError"),
    "the GPU's memory": (torch.OutOfMemoryError("CUDA out of memory"), MEMORY, "error  CUDA out of memory"),
    "the CPU's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MEMORY,
                         "error  DefaultCPUAllocator: can't allocate memory: you tried"),
    "overflow": (ArithmeticError("logits became non-finite"), INTERNAL, "error  logits became non-finite"),
    "our mistake": (RuntimeError("shapes differ"), INTERNAL, "error  RuntimeError: shapes differ (--debug shows where)"),
    "a key": (KeyError("tau"), INTERNAL, "error  KeyError: 'tau' (--debug shows where)"),
    "an empty message": (ValueError(), USAGE, "error  ValueError:"),
    "notes and line ends": (noted(ValueError("bad\n  weights \n"), "in layer 3", "of model.safetensors"), USAGE,
                            "error  bad weights in layer 3 of model.safetensors\n"),
    "no torch": (ModuleNotFoundError("No module named 'torch'"), INTERNAL,
                 "error  ModuleNotFoundError: No module named 'torch' (--debug shows where)\n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_an_error_is_one_line_and_its_exit_code(kind, capsys, monkeypatch):
    """Every kind of error is one line on stderr and has its own exit code; with --debug the error itself is raised."""
    error, code, line = ENDS[kind]
    if kind == "no torch":  # where the environment was not activated
        monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command(raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1 and "Traceback" not in err
    assert ("--debug" in err) == ("--debug" in line)
    with pytest.raises(type(error)) as caught:
        run_command(raising(error), debug=True)
    assert caught.value is error and capsys.readouterr().err == ""


def test_the_code_of_a_command(capsys):
    """The body's code is returned, and None counts as 0. Inside `bad_files` a plain ValueError has exit code 3; a usage
    error stays 2. Ctrl-C is one line with the notes of the KeyboardInterrupt, and the code is 130."""
    codes = [run_command(lambda code=code: code) for code in (None, 0, 1)]
    assert codes == [0, 0, 1] and all(type(code) is int for code in codes)
    for error, code in ((ValueError("no tensors"), BAD_FILE), (UsageError("--x"), USAGE)):
        assert run_command(bad_files()(raising(error))) == code
    capsys.readouterr()
    assert run_command(raising(KeyboardInterrupt())) == errors.INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"
    saved = noted(KeyboardInterrupt(), "step 7 is saved")
    assert run_command(raising(saved), interrupted="stopped") == errors.INTERRUPTED
    assert capsys.readouterr().err == "stopped step 7 is saved\n"
    assert run_command(raising(KeyboardInterrupt()), debug=True) == errors.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_an_option_that_cannot_be_read_is_one_line(capsys):
    """A bad value or an unknown option is one line on stderr, which names the nearest option where one is near, and exit
    code 2; abbreviations still work."""
    parser = errors.Parser(usage="short")
    parser.add_argument("--temperature", type=float)
    for words, says in (
        (["--temperature=x"], "argument --temperature"),
        (["--temprature=1"], "did you mean --temperature?"),
        (["why?"], "'why?' is no option (--help"),
    ):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(words)
        error = capsys.readouterr().err
        assert stop.value.code == USAGE and error.startswith("error  ") and says in error and error.count("\n") == 1
    assert parser.parse_args(["--temp", "1"]).temperature == 1


def test_a_closed_pipe_of_a_real_process_is_silent():
    """In a shell a closed pipe gives exit code 0 and an empty stderr."""
    body = "from support.errors import run_command\n"
    body += "def body():\n    for i in range(10**6): print(i)\n"
    body += "raise SystemExit(run_command(body))"
    shell = f'"{sys.executable}" -c "$BODY" | head -1; echo ${{PIPESTATUS[0]}}'
    environment = os.environ | {"BODY": body}
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "0"] and done.stderr == ""


@pytest.mark.parametrize("error", (ValueError("x"), KeyboardInterrupt()))
def test_a_line_of_progress_is_cleared_on_a_terminal_only(error, monkeypatch, capsys):
    """The control characters that clear a line are written to a terminal, and not to a file."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    run_command(raising(error))
    assert terminal.getvalue().startswith("\r\033[K") and terminal.getvalue().count("\033") == 1
    monkeypatch.undo()
    run_command(raising(error))
    assert "\033" not in capsys.readouterr().err


# ------------------------------------------------------------------ whole files

FAILURES = (RuntimeError("our mistake"), OSError(28, "No space left on device"), KeyboardInterrupt())


def test_a_file_appears_whole(tmp_path, monkeypatch):
    """Until the block ends the old content is there; afterwards the new one, and no temporary file. There is no moment at
    which neither has the name, in which a killed process would lose both."""
    path, seen = tmp_path / "f.txt", []
    path.write_text("old")

    def watched(source, target, real=os.replace):
        seen.append(path.read_text())
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with files.written_whole(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "old" and temporary.parent == path.parent
        temporary.write_text("new")
    assert seen == ["old"] and path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    files.write_text(str(path), "é")
    assert path.read_bytes() == "é".encode()
    files.write_json(path, {"b": 1, "a": [1.5, None]})
    assert path.read_text() == '{\n  "a": [\n    1.5,\n    null\n  ],\n  "b": 1\n}\n'
    assert files.read_json(path) == {"a": [1.5, None], "b": 1}


@pytest.mark.parametrize("writing", (files.written_whole, files.directory_written_whole))
@pytest.mark.parametrize("old", (False, True))
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failure_leaves_what_was_there_and_nothing_else(error, old, writing, tmp_path):
    """A failure in the block that leaves half a file or directory, loses the old one, or does not say where it was."""
    path, full_disk = tmp_path / "model", isinstance(error, OSError)
    put = fill if writing is files.directory_written_whole else Path.write_text
    if old:
        put(path, "old")
    before = held(tmp_path)
    with pytest.raises((type(error), ValueError)) as caught, writing(path) as unfinished:
        put(unfinished, "half")
        raise error
    assert held(tmp_path) == before and list(tmp_path.iterdir()) == [path] * old
    text = one_line(caught.value)
    if full_disk:  # it does not say where by itself
        assert caught.value.__cause__ is error and str(path) in text and "No space left on device" in text
    assert full_disk or caught.value is error
    assert isinstance(caught.value, ValueError) == (full_disk and writing is files.directory_written_whole)


def test_links_and_pipes_stay_what_they_are(tmp_path):
    """A link still points to its file, which has the new content; a pipe is written to."""
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    files.write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_what_a_dead_process_left_is_deleted_and_nothing_else(tmp_path):
    """Temporary files of dead processes go, those of living ones stay."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = {"f.1.part", "f.txt.1x.part", f"f.txt.{os.getppid()}.part", "f.txt.part", f"g.txt.{gone.pid}.part"}
    for name in (*kept, f"f.txt.{gone.pid}.part", f"f.txt.{gone.pid}.tmp"):
        (tmp_path / name).touch()
    files.write_text(tmp_path / "f.txt", "new")
    assert {p.name for p in tmp_path.iterdir()} == kept | {"f.txt"}


def test_a_folder_that_is_missing_is_named_before_the_work(tmp_path):
    """A file in a missing folder is a UsageError that names the flag."""
    for path in (None, tmp_path / "f.json", "f.json"):
        files.check_folder("--json", path)
    with pytest.raises(UsageError, match="--json .*no folder"):
        files.check_folder("--json", tmp_path / "none" / "f.json")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    """The OSError names the path that the user gave."""
    files.write_text(tmp_path / "f.txt", "old")
    for path in (tmp_path / "none" / "f.txt", tmp_path / "f.txt" / "below"):
        with pytest.raises(OSError, match=f"'{path}'$"):  # not the name of the temporary file
            files.write_text(path, "x")
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "f.txt", {"x": object()})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "kept").touch()
    with pytest.raises(OSError):
        files.write_text(tmp_path / "d", "x")
    assert (tmp_path / "f.txt").read_text() == "old"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["d", "f.txt", "kept"]


def fill(directory: Path, text: str) -> None:
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "a").write_text(text)


def held(directory: Path) -> dict[str, str]:
    """The files below a directory, temporary ones included."""
    return {p.relative_to(directory).as_posix(): p.read_text() for p in directory.rglob("*") if p.is_file()}


def test_a_directory_appears_whole(tmp_path, monkeypatch):
    """Until the block ends the old directory is there; afterwards the new one, with none of the old files. On Linux two
    names are swapped without a moment at which one is missing."""
    path = tmp_path / "out" / "model"
    with files.directory_written_whole(path) as unfinished:
        fill(unfinished, "one")
        assert not path.exists() and unfinished.parent == path.parent
    assert held(tmp_path) == {"out/model/sub/a": "one"}
    (path / "stale").write_text("x")
    if sys.platform == "linux":
        monkeypatch.setattr(files.os, "replace", lambda *names: pytest.fail(f"two renames: {names}"))
    with files.directory_written_whole(path) as unfinished:
        fill(unfinished, "two")
        assert held(path) == {"sub/a": "one", "stale": "x"}
    assert held(tmp_path) == {"out/model/sub/a": "two"} and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", (1, 2))
@pytest.mark.parametrize("error", (OSError(5, "Input/output error"), KeyboardInterrupt()), ids=("OSError", "Ctrl-C"))
def test_a_failure_between_the_two_renames_brings_the_old_directory_back(error, broken, tmp_path, monkeypatch):
    """An error at the second rename leaves the old directory in its place."""
    path, calls, rename = tmp_path / "model", [], os.replace
    fill(path, "old")

    def replace(source, target):
        calls.append(source)
        if len(calls) == broken:
            raise error
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    monkeypatch.setattr(files, "_exchange", lambda a, b: False)  # as where the system cannot swap two names
    with pytest.raises((ValueError, KeyboardInterrupt)), files.directory_written_whole(path) as unfinished:
        fill(unfinished, "new")
    assert held(tmp_path) == {"model/sub/a": "old"} and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------ JSON lines


def test_json_lines_come_back_in_order(tmp_path):
    """Appended values are read back in order, a missing folder is made, and what JSON cannot hold changes nothing. A last
    line without its end is not read, and is cut off before the next one is written."""
    path = tmp_path / "new" / "runs.jsonl"
    assert files.read_json_lines(path) == []
    runs = [{"i": 0, "text": "a\nb é"}, {"i": 1}, {}]
    torn = (b"", b'{"i": 9, "te', b'{"i": 9}', b"\xc3", b"{}" * 9)
    for number, (run, rest) in enumerate(itertools.product(runs, torn), 1):
        files.append_json_lines(path, run)
        with open(path, "ab") as file:
            file.write(rest)
        found = files.read_json_lines(path)
        assert found[-1] == run and len(found) == number
    with pytest.raises(TypeError):
        files.append_json_lines(path, {"a": object()})
    assert files.read_json_lines(path) == found
    path.write_bytes(torn[1])
    files.append_json_lines(path, *runs)
    assert files.read_json_lines(path) == runs and path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("bad", ("{", "[1]", "3", "null", '{"a": 1} x', "\ud800"))
def test_a_damaged_line_is_an_error_with_the_files_name(bad, tmp_path):
    """A line that is no JSON object of the shape is a BadFileError with file and line."""
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad.encode("utf-8", "surrogatepass") + b'\n{"a": 2}\n')
    refused(lambda: files.read_json_lines(path), "runs.jsonl")
    refused(lambda: files.read_json_lines(tmp_path), "cannot be read")


@pytest.mark.parametrize("bad", (b"", b"{", b"[1]", b"3", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"x" * 101))
def test_json_is_read_strictly(bad, tmp_path):
    """Every malformed text is a BadFileError of one line."""
    path = tmp_path / "config.json"
    path.write_bytes(bad)
    limit = 100 if bad.startswith(b"x") else files.JSON_LIMIT
    refused(lambda: files.read_json(path, limit=limit), "config.json")
    refused(lambda: files.read_json(tmp_path / "none.json"), "none.json: cannot be read")


# ------------------------------------------------------------------ facts about the machine


def test_facts_about_the_machine_are_plausible(monkeypatch):
    """Sizes are in decimal units, and bandwidth, memory and versions are of the right magnitude and type. Memory that the
    page cache would give back is free, and so is all of it on macOS, which does not know SC_AVPHYS_PAGES."""
    assert [machine.size_text(n) for n in (0, 999_949, 1e9, 1.55e12)] == ["0.0 MB", "1.0 MB", "1.0 GB", "1550.0 GB"]
    cpu = torch.device("cpu")
    assert 1e8 < machine.copy_bandwidth(cpu) < 1e13
    resident, peak = machine.resident_memory(), machine.peak_memory(cpu)
    if resident is not None and peak is not None:
        assert 50e6 < resident <= 1.05 * peak and peak < 1e12
    if (file := Path("/proc/meminfo")).exists():
        available = int(re.search(r"MemAvailable: *(\d+) kB", file.read_text())[1]) * 1024
        assert abs(machine.free_memory(cpu) - available) < 1e9
    monkeypatch.setattr(machine, "_bytes_of", lambda file, name: None)
    monkeypatch.delitem(machine.os.sysconf_names, "SC_AVPHYS_PAGES", raising=False)
    assert machine.free_memory(cpu) > 1e6 and json.loads(json.dumps(machine.versions())).keys() == {"python", "torch"}


def test_zeros_take_memory_where_they_are_written():
    """Zeros are zeros, and memory is taken only for pages that are written."""
    cpu = torch.device("cpu")
    cache = zeros((4, 1 << 20), torch.float32, cpu)
    assert cache.shape == (4, 1 << 20) and not cache.any()
    cache[2, :1000] = 1.0
    assert cache.sum() == 1000.0
    for shape, dtype in (((3, 0, 2), torch.float32), ((), torch.int8), ((5, 7), torch.bfloat16), ((2,), torch.bool)):
        assert torch.equal(zeros(shape, dtype, cpu), torch.zeros(shape, dtype=dtype))
    resident = machine.resident_memory()
    untouched = zeros((1 << 28,), torch.uint8, cpu)
    untouched[1 << 27] = 1
    assert resident is None or machine.resident_memory() - resident < 10e6


def test_a_start_imports_only_what_it_needs():
    """Triton, templates and grammars cost a start a second when every request imports them, and so does torch's compiler
    where weights on the meta device are initialised or moved, or an operator of the project is called."""
    program = """
import sys
import torch
import cli.once
print(*sorted({"triton", "jinja2", "llguidance", "transformers"} & {*sys.modules}))
from support.machine import shapes_only
with shapes_only():
    module = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1 << 40))
assert all(p.is_meta for p in module.parameters())
assert torch.equal(torch.nn.init.ones_(torch.empty(2)), torch.ones(2)), "outside, weights are initialised"
from decoding.params import SamplingParams
from engine.load import load
from weights.shards import rank_sum
engine = load("demo", eagle="demo/eagle1", device="cpu")
engine.generate("def", SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=2)).run()
try:
    rank_sum(torch.ones(2), 2)
except AttributeError:  # there are no processes
    print(*{"torch._dynamo", "sympy"} & {*sys.modules})
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == f"{'triton' if torch.cuda.is_available() else ''}\n\n", done.stderr


def test_the_collector_is_off_inside_and_back_after_an_error():
    """A failed load must not leave a process that never frees cycles."""
    with pytest.raises(ValueError, match="broken"), without_collector():
        assert not gc.isenabled()
        raise ValueError("broken")
    assert gc.isenabled()


def test_freed_memory_returns_and_settings_are_restored(monkeypatch):
    """Freed memory leaves the process, and malloc's settings are set back, also after an error or without glibc."""
    with pytest.raises(KeyError), freed_memory_returns():
        raise KeyError
    resident = machine.resident_memory()
    with freed_memory_returns():
        blocks = [torch.ones(1 << 18) for _ in range(200)]  # 1 MB each
        kept = [torch.ones(1 << 18) for _ in range(2)]
        del blocks
    if resident is not None and platform.libc_ver()[0] == "glibc":
        assert machine.resident_memory() - resident < 30e6
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with freed_memory_returns():
        assert len(kept) == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_the_peak_is_that_of_this_process():
    """A child of a large process reports its own peak."""
    held = torch.ones(3 << 26)  # 805 MB
    program = "import torch; from support.machine import peak_memory; print(peak_memory(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) < 600e6 < held.nbytes < machine.peak_memory(torch.device("cpu"))


GROUP, FOLDER = "/proc/self/cgroup", "/sys/fs/cgroup"
PAIRS = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}  # two threads on each of two cores
CORES = {i: str(i) for i in range(4)}


@pytest.mark.parametrize(
    "given, cpus, siblings, quota, count",
    [
        (None, 4, PAIRS, {}, 2), (None, 2, CORES, {}, 2), (None, 2, {0: "0"}, {}, 5), ("3", 2, CORES, {}, 3),
        ("6,2", 2, CORES, {}, 6), ("many", 2, CORES, {}, 2), ("0", 2, CORES, {}, 2),
        (None, 4, CORES, {GROUP: ["0::/a/b"], f"{FOLDER}/a/cpu.max": ["150000 100000"]}, 1),
        (None, 4, CORES, {GROUP: ["0::/"], f"{FOLDER}/cpu.max": ["200000 100000"]}, 2),
        (None, 4, CORES, {GROUP: ["0::/"], f"{FOLDER}/cpu.max": ["max 100000"]}, 4),
        (None, 4, CORES, {f"{FOLDER}/cpu/cpu.cfs_{name}_us": [us] for name, us in
                          (("quota", "300000"), ("period", "100000"))}, 3),
        (None, 4, CORES, {f"{FOLDER}/cpu/cpu.cfs_{name}_us": [us] for name, us in
                          (("quota", "-1"), ("period", "100000"))}, 4),
        (None, 4, CORES, {GROUP: ["0::/"], f"{FOLDER}/cpu.max": ["50000 100000"]}, 1),
    ],
)  # fmt: skip
def test_threads_are_the_cores_of_this_process(given, cpus, siblings, quota, count, monkeypatch):
    """One thread per core that this process may use, and no more than a quota of control groups pays for (of either
    version, of a parent group too): a container with half of a machine had a thread per core, and they were stopped in
    turn. OMP_NUM_THREADS comes first; without these files it is torch's number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    lines = quota | {topology.format(cpu): [text] for cpu, text in siblings.items()}
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.setattr(machine, "_lines_of", lambda file: lines.get(file, []))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert machine.default_threads() == count
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.default_threads() == (count if given in ("3", "6,2") else 5)


# ------------------------------------------------------------------ progress


def test_progress_is_a_bar_on_a_terminal_and_a_line_in_a_log(monkeypatch):
    """A terminal shows a bar that goes away; a log gets one line per 20 seconds, without control characters; a quiet bar
    writes nothing. A bar that an interrupted command left open moves it to no other line."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    left = Progress()
    left(0.5)
    progress = Progress()
    for done in range(5):
        progress.of(done, 4, f"piece {done}")
    shown = terminal.getvalue()
    assert "piece 0" in shown and " 75%" in shown and progress.bar is None
    assert shown.endswith("\r") and not shown.rpartition("\r")[0].rpartition("\r")[2].strip(), "the bar is gone"
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    progress = Progress()
    for done in range(4):
        progress.of(done, 4, "piece")
    assert log.getvalue() == ""
    progress.bar.start_t -= 100  # as if this had taken long
    progress.bar.last_print_t -= 100
    progress(0.75, "piece")
    progress.close()
    assert re.fullmatch(r" *75%\|.*left  piece\n", log.getvalue())
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    Progress(quiet=True)(0.5, "piece")
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [("avx2 avx512_vnni", "AMD EPYC (AVX512-VNNI), "), ("sse avx2", "AMD EPYC (AVX2), "), ("sse", "AMD EPYC, ")],
)
def test_a_cpu_is_named_with_what_its_kernels_use(monkeypatch, flags, named):
    """The name ends with the vector extension that the kernels use, if there is one."""
    lines = ["processor : 0", "model name\t: AMD EPYC", f"flags\t\t: {flags}"]
    monkeypatch.setattr(machine, "_lines_of", lambda file: lines)
    monkeypatch.delenv("EAGLET_ISA", raising=False)
    assert machine.describe_device(torch.device("cpu")).startswith(named)
