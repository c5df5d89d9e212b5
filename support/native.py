"""C++ operators for torch: compiled once for this machine, and kept in the cache folder."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch

from support import cache
from support.files import written_whole
from support.machine import cpu_flags

BUILD_SECONDS = 300  # of a machine that is busy; 30 s of one processor
FLAGS = "-O3 -fno-tree-reassoc -fno-tree-ter -std=c++20 -fPIC".split()  # the second and third spare registers
SAY_SECONDS = 1  # between two signs that a build goes on
BUILDING = "note    building the C++ kernels, once for this machine: about 10 to 30 s ."


def build(sources: Sequence[Path], needed: Sequence[str], records: str = "") -> Path:
    """The library of C++ files for `torch.ops.load_library`. It is compiled unless the cache folder holds it.

    Several processes may build at once. Where nothing can be kept, the library lies in a folder of this process.

    Args:
        sources: files that use libtorch's stable interface (torch/csrc/stable), which compiles in seconds, and headers.
        needed: what the processor must be able to do, in the words of /proc/cpuinfo.
        records: the text of records.h, a header that the sources may include.

    Raises:
        ValueError: one line that says why there is no library.
    """
    flags = cpu_flags()
    if missing := [name for name in needed if name not in flags]:
        raise ValueError(f"this processor ({platform.machine()}) has no {missing[0]}")
    processor = os.environ.get("EAGLET_ISA", "native")
    identity = b"".join(source.read_bytes() for source in sources)
    identity += " ".join([*FLAGS, records, torch.__version__, processor, *sorted(flags)]).encode()
    name = f"{sources[0].stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    library = cache.folder() / "kernels" / name
    if cache.sealed(library):  # a library that the disk has damaged would end the process
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(library) as part:
            compile_library(sources, part, records, processor)
        cache.seal(library)
    except OSError:
        library = Path(tempfile.mkdtemp(prefix="eaglet-")) / name
        compile_library(sources, library, records, processor)
    return library


def compile_library(sources: Sequence[Path], target: Path, records: str, processor: str = "native") -> None:
    """Compile for this processor, or for another one that -march names. records: the text of records.h.

    Says on stderr what it waits for. Raises ValueError in one line if there is no compiler or if it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise ValueError("there is no C++ compiler (g++ or clang++)")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="eaglet-") as folder:
        Path(folder, "records.h").write_text(records, encoding="utf-8")
        command = [compiler, *FLAGS, f"-march={processor}", f"-I{root / 'include'}", f"-I{folder}"]
        files = [source for source in sources if source.suffix == ".cpp"]
        files.sort(key=lambda file: file.stat().st_size, reverse=True)  # the last one to end should be a short one
        objects = [str(Path(folder, f"{file.stem}.o")) for file in files]
        compiling = [[*command, "-c", str(file), "-o", name] for file, name in zip(files, objects, strict=True)]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run(compiling)
        _compile([compiler, "-shared", *objects, "-o", str(target), *libraries])


def _run(commands: Sequence[list[str]]) -> None:
    """Commands side by side, one for each processor. After a second, a line on stderr says what is waited for."""
    said, started = "", time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(_compile, command) for command in commands]
        try:
            for job in jobs:
                while wait([job], SAY_SECONDS).not_done:
                    said = "." if said else BUILDING
                    print(said, end="", file=sys.stderr, flush=True)
                job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f" {time.monotonic() - started:.0f} s\n" if said else "", end="", file=sys.stderr, flush=True)


def _compile(command: list[str]) -> None:
    """Raise ValueError in one line if the compiler does not start, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except OSError as error:
        raise ValueError(f"the compiler {command[0]} does not start ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{command[0]} took more than {BUILD_SECONDS} seconds") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise ValueError(f"{command[0]} failed: {lines[0]}")
