"""C++ operators for torch: compiled once for this machine, and kept in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from support import cache
from support.files import written_whole
from support.machine import cpu_flags

BUILD_SECONDS = 300  # of a machine that is busy; 30 s of one processor
SAY_SECONDS = 1  # between two signs that a build goes on


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
    identity = b"".join(source.read_bytes() for source in sources)
    identity += records.encode() + torch.__version__.encode() + " ".join(sorted(flags)).encode()
    name = f"{sources[0].stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    library = cache.folder() / "kernels" / name
    if cache.sealed(library):  # a library that the disk has damaged would end the process
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(library) as part:
            compile_library(sources, part, records)
        cache.seal(library)
    except OSError:
        library = Path(tempfile.mkdtemp(prefix="eaglet-")) / name
        compile_library(sources, library, records)
    return library


def compile_library(sources: Sequence[Path], target: Path, records: str, processor: str = "native") -> None:
    """Compile for this processor, or for another one that -march names. records: the text of records.h.

    Says on stderr what it waits for. Raises ValueError in one line if there is no compiler or if it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise ValueError("there is no C++ compiler (g++ or clang++)")
    root = Path(torch.__file__).parent
    files = [str(source) for source in sources if source.suffix == ".cpp"]
    command = [compiler, "-O3", f"-march={processor}", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
    command += [*files, "-o", str(target), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(prefix="eaglet-") as folder:
        Path(folder, "records.h").write_text(records, encoding="utf-8")
        command.append(f"-I{folder}")
        code, errors = _run(command)
    if code:
        lines = [line for line in errors.splitlines() if "error" in line] or ["no message"]
        raise ValueError(f"{compiler} failed: {lines[0]}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    """The compiler's exit code and what it wrote on stderr. After a second, a line on ours says what is waited for."""
    said, started = "", time.monotonic()
    try:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as compiler:
            while time.monotonic() - started < BUILD_SECONDS:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    errors = compiler.communicate(timeout=SAY_SECONDS)[1]
                    return compiler.returncode, errors
                said = "." if said else "note    building the C++ kernels, once for this machine: about 10 to 50 s ."
                print(said, end="", file=sys.stderr, flush=True)
            compiler.kill()
    except OSError as error:
        raise ValueError(f"the compiler {command[0]} does not start ({error.strerror})") from error
    finally:
        print(f" {time.monotonic() - started:.0f} s\n" if said else "", end="", file=sys.stderr, flush=True)
    raise ValueError(f"{command[0]} took more than {BUILD_SECONDS} seconds")
