"""Everything that needs a CUDA device, in one command: tilings, tests, starts, step times, kernels, decoding.

    make gpu                               # under 8 minutes from cold caches; installs nothing, needs no network
    make gpu-full                          # every cell; run it again and it goes on where it was stopped
    python -m scripts.gpu --full --seconds 540     # as much of it as fits
    python -m scripts.gpu --only steps             # one part
    python -m scripts.gpu --readme docs/results.md # the table 'on a GPU' from benchmarks/results/*-steps.jsonl
    python -m scripts.gpu --device cpu --tiny      # tries the machinery on small shapes; measures nothing

Every part is a process of its own with a time limit. The time that a part leaves over goes to the next ones. All parts
write what they have as they go, so whatever ends a run, what was measured is kept, and the next run goes on from there. A
copy of the code without its .git takes its commit from the variable EAGLET_COMMIT. Finished cells and parts count for the
same commit, device and torch alone.

    NAME-steps.jsonl     copy bandwidth, starts, one line per step-time cell, launches  (scripts.step_time)
    NAME-tilings.json    the fastest tiling of every layer shape                        (scripts.bench_kernels)
    NAME-kernels.jsonl   one line per layer shape, kernel and number of rows, DRAM bytes (scripts.bench_kernels)
    NAME-demo.jsonl      the demo model's decoders against each other                   (scripts.bench)
    NAME-summary.json    the machine, the parts, how they ended, how long they took
    NAME.log             everything that the parts printed
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu_report import goals, kernel_goals, readme_block, table
from bench.step_run import POISONED, identity, machine, utc
from support.errors import UsageError, command_parser, run_command
from support.files import append_json_lines, read_json, read_json_lines, replace_block, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "EAGLET_CACHE", "CUDA_CACHE_PATH")
OURS = ("int4", "int4-gated", "int8", "int4-dequant", "half")  # kernels, most important first
RESUMED = ("bandwidth", "tilings", "steps", "kernels", "peers")  # parts that look up by themselves what is done


@dataclass
class Part:
    """A command and its time limit. The word {seconds} in it becomes the time it has, {now} the time it starts."""

    name: str
    command: list[str]
    seconds: float
    env: dict[str, str] = field(default_factory=dict)
    retry: int | None = None  # exit code after which it is started again, with --skip-failed


def run(command: list[str], log: Path, seconds: float, env: dict[str, str]) -> int | str:
    """Run a command with its output in `log`. At the limit, or on Ctrl-C, it is killed with its children."""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"\n== {' '.join(command)}\n")
        out.flush()
        how = {"stdout": out, "stderr": subprocess.STDOUT, "env": os.environ | env, "cwd": ROOT}
        started = subprocess.Popen(command, start_new_session=True, **how)
        try:
            return started.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"killed after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it left behind, such as compile workers
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def run_part(part: Part, log: Path, seconds: float) -> dict[str, Any]:
    """Run one part, again where it asks for that. Its last lines go to the terminal."""
    began, left, attempts, code = time.time(), seconds, 0, None
    while not attempts or (code == part.retry and attempts < 4 and left >= 20):
        values = {"{seconds}": f"{max(5, left - 15):.0f}", "{now}": f"{time.time():.3f}"}
        command = [values.get(word, word) for word in part.command] + ["--skip-failed"] * bool(attempts)
        print(f"== {part.name}: {' '.join(command)}  (at most {left:.0f} s)", flush=True)
        at = log.stat().st_size if log.exists() else 0
        code, attempts = run(command, log, left, part.env), attempts + 1
        tail = log.read_bytes()[at:].decode(errors="replace").splitlines()[-12:]
        print("\n".join(line[:200] for line in tail), flush=True)
        left = seconds - (time.time() - began)
    took = round(seconds - left, 1)
    return {"part": part.name, "exit": code, "seconds": took, "limit": round(seconds, 1), "attempts": attempts}


def parts(args: argparse.Namespace, out: Path, name: str, cache: str) -> list[Part]:
    """What to run, in order, with limits in seconds that add up to under eight minutes (without --full)."""
    full = args.full
    steps, kernels, demo = (str(out / f"{name}-{kind}.jsonl") for kind in ("steps", "kernels", "demo"))
    shared, fresh = ({key: os.path.join(cache, which, key) for key in CACHES} for which in ("shared", "start"))
    shared = {} if full else shared  # `make gpu` starts with cold caches, a resumed run with the machine's
    step_time = _module("scripts.step_time", "--json", steps, *["--device", "cpu", "--tiny"] * args.tiny)
    start = [*step_time, "--since", "{now}", "--start"]
    cells = ["--seconds", "{seconds}", "--cell-seconds", "600" if full else "70", *["--full"] * full]
    only = [] if full else ["--models", "llama-3-8b"]
    shapes = [] if full else [*only, "--m", "1", "16", "32", "64", "104", "256"]
    if args.tiny:
        shapes = ["--device", "cpu", "--quick", "--models", "llama-3-8b", "--m", "1", "16"]
    bench = _module("scripts.bench_kernels", "--json", kernels, "--resume")
    tune = [*bench, "--tune", *only, "--seconds", "{seconds}"]
    tune += [] if full else ["--tuned", str(out / f"{name}-tilings.json")]  # a full run keeps them for generate.py
    dram = [*bench, "--dram", "--models", "llama-3-8b", "--m", "1", "32"]
    micro = [*bench, *shapes]
    micro += [*_committed("kernels", kernels, full), "--kernels"]
    compare = _module("scripts.bench", "--json", demo, "--reps", "1", "--limit", "2")
    compare += ["--max-new-tokens", "8"] if args.tiny else ["--compile", "--max-seconds", "300" if full else "15"]
    rows = [  # name, limit of make gpu, limit of make gpu-full, variables, command
        ("bandwidth", 25, 120, {}, [*step_time, "--bandwidth"]),
        *([] if args.tiny else [("tilings", 60, 3600, shared, tune)]),
        ("tests", 70, 1800, shared, _tests(args.tiny, full)),
        ("cold", 70, 300, fresh, [*start, "cold"]),
        ("warm", 20, 300, fresh, [*start, "warm"]),
        ("steps", 110, 6 * 3600, shared, [*step_time, *cells, *_committed("steps", steps, full)]),
        ("kernels", 45, 3600, shared, [*micro, *OURS, "cublas", "tinygemm"]),
        *([] if args.tiny else [("dram", 15, 120, shared, dram)]),
        ("peers", 15, 3600, shared, [*micro, "torchao", "gemlite"]),
        ("demo", 25, 900, shared, compare),
        *(_sanitizer() if full and not args.tiny else []),
    ]
    again = {"steps": POISONED}
    found = [Part(part, words, long if full else short, env, again.get(part)) for part, short, long, env, words in rows]
    return [part for part in found if not args.only or part.name in args.only]


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _committed(kind: str, mine: str, full: bool) -> list[str]:
    """Options that name earlier results of a kind, so that what they hold is not measured again."""
    files = [str(p) for p in sorted(RESULTS.glob(f"*-{kind}.jsonl")) if p.resolve() != Path(mine).resolve()]
    return ["--done", *files] if files and full else []


def _tests(tiny: bool, full: bool) -> list[str]:
    """The tests that need a GPU. Without `full`, the linears' run on one shape: all of them compile 272 kernels."""
    files = [str(f) for f in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in f.read_text("utf-8")]
    command = _module("pytest", "-m", "gpu", "-vv", "--tb=short", "--durations=10", *files)
    if not full:
        command += ["-k", "not (test_linear_on_device or test_linear_rows) or 6144-4096"]
    if importlib.util.find_spec("xdist") and not tiny:  # most of the tests' time is compiling, on the CPU
        command += ["-n", str(min(14, os.cpu_count() or 1))]
    return command


def _sanitizer() -> list[tuple]:
    """The rows of the kernel tests under compute-sanitizer, if it is installed."""
    places = [os.environ.get("PATH", ""), *glob.glob("/usr/local/cuda*/bin")]
    checker = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    few = "test_linear_in_a_cuda_graph or test_norm_and_rope or test_experts"
    watched = ["--error-exitcode", "9", *_module("pytest", "-m", "gpu", "-q", "-k", few, "tests/test_kernels_gpu.py")]
    return [(tool, 0, 900, {}, [checker, "--tool", tool, *watched]) for tool in ("memcheck", "racecheck") if checker]


def finished(files: Iterable[Path], env: dict[str, Any], full: bool = True) -> dict[str, dict[str, Any]]:
    """The parts of earlier summaries that ran to their end on this device, torch and commit, without those in RESUMED.

    What a short run left out does not count for a full one.
    """
    found = {}
    for summary in (read_json(file) for file in files if file.exists()):
        if identity(summary["environment"]) == identity(env) and summary.get("full", True) >= full:
            found |= {part["part"]: part for part in summary["parts"] if part["exit"] == 0}
    return {name: part for name, part in found.items() if name not in RESUMED}


def readme(path: Path, results: Path) -> str:
    """Write the block 'gpu' of a file from the committed step times. Returns the block's text."""
    lines = [line for file in sorted(results.glob("*-steps.jsonl")) for line in read_json_lines(file)]
    text = readme_block(lines)
    replace_block(path, "gpu", text)
    return text


def run_all(args: argparse.Namespace) -> int:
    """Run the parts one after the other and print what they say. Returns 0 if every part ran to its end, else 1."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("make gpu needs a CUDA device, and this torch sees none. `make test` runs the rest.")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    label = torch.cuda.get_device_name() if device.type == "cuda" else "cpu tiny"
    name = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    summary = {"environment": machine(device), "full": args.full, "parts": [], "command": " ".join(sys.argv)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    with tempfile.TemporaryDirectory(prefix="eaglet-gpu-", ignore_cleanup_errors=True) as cache:
        run_parts(args, out, name, cache, summary)
    lines = read_json_lines(out / f"{name}-steps.jsonl")
    print(f"\n{table(lines)}\n\ngoals for an H100:\n" + "\n".join(goals(lines)))
    kernel_lines = read_json_lines(out / f"{name}-kernels.jsonl")
    print("kernels, LLaMA-3-8B layers together, goals for an H100:\n" + "\n".join(kernel_goals(kernel_lines)))
    for ended in summary["parts"]:
        print(f"{ended['part']:<10} exit {ended['exit']}  {ended['seconds']} s")
    failed = [ended["part"] for ended in summary["parts"] if ended["exit"] != 0]
    print(f"{'not complete: ' + ', '.join(failed) if failed else 'all parts ran'}; results in {out}")
    return 1 if failed else 0


def run_parts(args: argparse.Namespace, out: Path, name: str, cache: str, summary: dict[str, Any]) -> None:
    """Run the parts that are left. After each of them `summary` gets its end and is written."""
    began = due = time.time()
    summaries = [folder / f"{name}-summary.json" for folder in (RESULTS, out)]
    earlier = finished(summaries, summary["environment"], args.full)
    tilings = out / f"{name}-tilings.json"
    for part in parts(args, out, name, cache):
        if part.name in earlier:
            summary["parts"].append(earlier[part.name])
            continue
        due += part.seconds
        until = min(due, began + args.seconds) if args.seconds else due
        seconds = until - time.time()
        if seconds < 5:
            summary["parts"].append({"part": part.name, "exit": "not started: no time left", "seconds": 0})
            continue
        if part.name == "steps" and part.env and Path(cache, "start").exists():  # compiled once is enough
            with contextlib.suppress(OSError):
                shutil.copytree(Path(cache, "start"), Path(cache, "shared"), dirs_exist_ok=True)
        if part.env and tilings.exists():
            found = Path(part.env["EAGLET_CACHE"], "kernels.json")
            found.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tilings, found)
        ended = run_part(part, out / f"{name}.log", seconds)
        summary["parts"].append(ended)
        if part.name in ("cold", "warm") and isinstance(ended["exit"], str):
            line = {"type": "start", "cache": part.name, "error": ended["exit"], "utc": utc()}
            append_json_lines(out / f"{name}-steps.jsonl", line)
        summary["seconds"] = round(time.time() - began, 1)
        write_json(out / f"{name}-summary.json", summary)


def main(argv: list[str] | None = None) -> int:
    """0: every part ran to its end; 1: a part failed or was killed; 2: usage."""
    parser = command_parser("scripts.gpu", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    add("--full", action="store_true", help="everything; resumable")
    add("--seconds", type=float, help="limit of the whole run (default: that of its parts)")
    add("--only", nargs="+", default=[], metavar="PART", help="bandwidth tilings tests cold warm steps ...")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tiny", action="store_true", help="with --device cpu: small shapes, to try the machinery")
    add("--readme", type=Path, metavar="FILE", help="only rewrite this file's table of GPU results")
    add("--results", type=Path, default=RESULTS, help="with --readme: where the results lie")
    args = parser.parse_args(argv)
    if args.readme:
        return run_command(lambda: print(readme(args.readme, args.results)), args.debug)
    if (args.device == "cpu") != args.tiny:
        parser.error("--device cpu and --tiny go together")
    return run_command(lambda: run_all(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
