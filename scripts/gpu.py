"""Everything that needs a CUDA device, in one command: tests, starts, step times, kernels, a decode comparison.

    make gpu                               # under 8 minutes from cold caches; installs nothing, needs no network
    make gpu-full                          # every cell; run it again and it goes on where it was stopped
    python -m scripts.gpu --full --seconds 540     # as much of it as fits
    python -m scripts.gpu --readme docs/results.md # the table 'on a GPU' from benchmarks/results/*-steps.jsonl
    python -m scripts.gpu --device cpu --tiny      # tries the machinery on small shapes; measures nothing

Every part is a process of its own with a time limit; the time that a part leaves over goes to the next ones. All parts
write what they have as they go, so whatever ends a run, what was measured is kept. A copy of the code without its .git
takes its commit from the variable EAGLET_COMMIT; finished cells count for the same commit, device and torch alone.

    NAME-steps.jsonl     copy bandwidth, starts, one line per step-time cell, launches  (scripts.step_time)
    NAME-kernels.jsonl   one line per layer shape, kernel and number of rows            (scripts.bench_kernels)
    NAME-demo.jsonl      the demo model's decoders against each other                   (scripts.bench)
    NAME-summary.json    the machine, the parts, how they ended, how long they took
    NAME.log             everything that the parts printed
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
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

from bench.environment import environment
from bench.kernel_timing import PEERS
from bench.step_time import POISONED, append, identity, read_lines, table, utc
from support.files import replace_block

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "EAGLET_CACHE", "CUDA_CACHE_PATH")


@dataclass
class Part:
    """A command and its time limit. In `command`, {seconds} becomes the time it has and {now} the time it starts."""

    name: str
    command: list[str]
    seconds: float
    env: dict[str, str] = field(default_factory=dict)
    retry: int | None = None  # exit code after which it is started again, with --skip-failed


def run(command: list[str], log: Path, seconds: float, env: dict[str, str]) -> int | str:
    """Run a command with its output in `log`; at the limit (or on Ctrl-C here) it and its children are killed."""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"\n== {' '.join(command)}\n")
        out.flush()
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            return started.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"killed after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it left behind, compile workers say
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def run_part(part: Part, log: Path, seconds: float) -> dict[str, Any]:
    """Run one part, again where it asks for that; its last lines go to the terminal."""
    began, attempts, code = time.time(), 0, None
    while code is None or (code == part.retry and attempts < 4):
        left = seconds - (time.time() - began)
        if attempts and left < 20:
            break
        values = {"seconds": f"{max(5, left - 15):.0f}", "now": f"{time.time():.3f}"}
        command = [re.sub(r"\{(seconds|now)\}", lambda m: values[m[1]], word) for word in part.command]  # noqa: B023
        command += ["--skip-failed"] * bool(attempts)
        print(f"== {part.name}: {' '.join(command)}  (at most {left:.0f} s)", flush=True)
        at = log.stat().st_size if log.exists() else 0
        code, attempts = run(command, log, left, part.env), attempts + 1
        with log.open("rb") as read:
            read.seek(at)
            tail = read.read().decode(errors="replace").splitlines()[-12:]
        print("\n".join(line[:200] for line in tail), flush=True)
    took = round(time.time() - began, 1)
    return {
        "part": part.name,
        "exit": code,
        "seconds": took,
        "limit": round(seconds, 1),
        "attempts": attempts,
    }


def parts(args: argparse.Namespace, out: Path, name: str, cache: str) -> list[Part]:
    """What to run, in order, with limits in seconds that add up to under eight minutes (without --full)."""
    python, full, tiny = sys.executable, args.full, ["--device", "cpu", "--tiny"] if args.tiny else []
    steps, kernels, demo = (str(out / f"{name}-{kind}.jsonl") for kind in ("steps", "kernels", "demo"))
    shared, fresh = (
        {key: os.path.join(cache, which, key) for key in CACHES} for which in ("shared", "start")
    )
    shared = {} if full else shared  # cold caches for `make gpu`; those of the machine where a run is resumed
    step_time = [python, "-m", "scripts.step_time", "--json", steps, *tiny]

    def committed(kind: str, mine: str) -> list[str]:
        """Options that name earlier results of a kind, so that what they hold is not measured again."""
        files = [
            str(p) for p in sorted(RESULTS.glob(f"*-{kind}.jsonl")) if p.resolve() != Path(mine).resolve()
        ]
        return ["--done", *files] if files and full else []

    files = [str(f) for f in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in f.read_text("utf-8")]
    tests = [python, "-m", "pytest", "-m", "gpu", "-vv", "--tb=short", "--durations=10", *files]
    if importlib.util.find_spec("xdist") and not args.tiny:
        tests += [
            "-n",
            str(min(6, os.cpu_count() or 1)),
        ]  # most of their time is compiling kernels, on the CPU
    shapes = [] if full else ["--models", "llama-3-8b", "--m", "1", "16", "32", "64", "104", "256"]
    if args.tiny:
        shapes = ["--device", "cpu", "--quick", "--models", "llama-3-8b", "--m", "1", "16"]
    micro = [python, "-m", "scripts.bench_kernels", "--json", kernels, "--resume", *shapes]
    micro += [*committed("kernels", kernels), "--kernels"]
    ours, peers = ["int4", "int8", "int4-dequant", "half", "cublas", "tinygemm"], ["torchao", "gemlite"]
    compare = [python, "-m", "scripts.bench", "--json", demo, "--reps", "1", "--questions", "2"]
    compare += (
        ["--max-new-tokens", "8"] if args.tiny else ["--compile", "--max-seconds", "300" if full else "15"]
    )
    limit = (lambda quick, long: long) if full else (lambda quick, long: quick)
    found = [
        Part("bandwidth", [*step_time, "--bandwidth"], limit(35, 120)),
        Part("tests", tests, limit(115, 1800), shared),
        Part("cold", [*step_time, "--start", "cold", "--since", "{now}"], limit(75, 300), fresh),
        Part("warm", [*step_time, "--start", "warm", "--since", "{now}"], limit(20, 300), fresh),
        Part(
            "steps",
            [*step_time, "--seconds", "{seconds}", "--cell-seconds", "600" if full else "70", *["--full"] * full]
            + committed("steps", steps),
            limit(120, 6 * 3600), shared, POISONED,
        ),
        Part("kernels", [*micro, *ours], limit(45, 3600), shared),
        Part("peers", [*micro, *peers], limit(12, 3600), shared),
        Part("demo", compare, limit(30, 900), shared),
    ]  # fmt: skip
    checker = shutil.which("compute-sanitizer") or next(
        iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None
    )
    if full and checker and not args.tiny:
        few = "test_linear_in_a_cuda_graph or test_norm_and_rope or test_experts"
        watched = [python, "-m", "pytest", "-m", "gpu", "-q", "-k", few, "tests/test_kernels_gpu.py"]
        for tool in ("memcheck", "racecheck"):
            found.append(Part(tool, [checker, "--tool", tool, "--error-exitcode", "9", *watched], 900))
    return [part for part in found if not args.only or part.name in args.only]


def finished(files: Iterable[Path], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parts of earlier summaries that ran to their end on this device, torch and commit, and resume nothing by
    themselves."""
    found = {}
    for file in files:
        for summary in read_lines(file, whole=True):
            if identity(summary["environment"]) == identity(now["environment"]):
                found |= {part["part"]: part for part in summary["parts"] if part["exit"] == 0}
    return {
        name: part for name, part in found.items() if name not in ("bandwidth", "steps", "kernels", "peers")
    }


def goals(lines: Iterable[dict[str, Any]]) -> list[str]:
    """The goals for an H100 against what was measured; a goal without its figures is called unmeasured."""
    lines = [line for line in lines if "error" not in line]
    cells = {
        (c["quant"], c["tree"], c["head_quant"], c["context"]): c
        for c in lines
        if c.get("type") == "step_time" and c["shape"] == "llama-3-8b"
    }
    real = [line for line in lines if str(line.get("key", "")).startswith("llama")]
    starts = {line["cache"]: line["total_s"] for line in real if line["type"] == "start"}
    graphs = [line["graphs"] for line in real if line["type"] == "launches"]
    plain = cells.get(("", "", "", 128))
    chain, wide = (cells.get(("", tree, "int8", 128)) for tree in ("chain:7", "dynamic:60,7,10"))
    rated = [("tok/s at tau 3.91, 7-chain", chain, 455), ("tok/s at tau 6.13, 60 nodes", wide, 700)]
    verify = wide["split_ms"]["verify"] / plain["step_ms"]["median"] if plain and wide else None
    share = wide["split_ms"]["draft"] / wide["step_ms"]["median"] if wide else None
    checks: list[tuple[str, float | None, str, float]] = [
        ("plain bf16 decoding, share of copy bandwidth", plain and plain["share_of_copy"], ">=", 0.85),
        ("verify of 60 nodes over the one-node step", verify, "<=", 1.10),
        ("draft's share of a 60-node step, int8 head", share, "<=", 0.20),
        ("host gap of a 60-node step, ms", wide and wide["host_gap_ms"], "<=", 0.05),
        *(
            (text, cell and cell["synthetic"]["tokens_per_second"], ">=", least)
            for text, cell, least in rated
        ),
        ("cold start, s", starts.get("cold"), "<=", 60),
        ("warm start, s", starts.get("warm"), "<=", 10),
        ("CUDA graphs launched per step", max(graphs) if graphs else None, "<=", 1),
    ]
    return judged(checks)


def kernel_goals(lines: Iterable[dict[str, Any]], model: str = "llama-3-8b") -> list[str]:
    """The kernels' goals for an H100 over all layers of one model together: share of the copy bandwidth, flatness from
    1 row to 64, and the fastest peer at 16 and 32 rows."""
    total: dict[
        tuple[str, int], dict[str, tuple[float, float]]
    ] = {}  # (kernel, rows) -> layer -> (us, bytes)
    copy = 0.0
    for line in lines:
        if line.get("model") == model and "us" in line and "not a GPU" not in line["device"]:
            total.setdefault((line["kernel"], line["m"]), {})[line["layer"]] = (
                line["us"],
                line["gbs"] * line["us"],
            )
            copy = line["copy_gbs"]
    layers = {layer for found in total.values() for layer in found}

    def us(kernel: str, rows: int) -> float | None:
        found = total.get((kernel, rows), {})
        return sum(t for t, _ in found.values()) if layers and found.keys() == layers else None

    def share(kernel: str, rows: int) -> float | None:
        time_us = us(kernel, rows)
        return time_us and sum(size for _, size in total[kernel, rows].values()) / time_us / copy

    def over(kernel: str, rows: int, other: str, others: int) -> float | None:
        mine, theirs = us(kernel, rows), us(other, others)
        return mine and theirs and mine / theirs

    checks: list[tuple[str, float | None, str, float]] = []
    for kernel, bound in (("int4", 0.65), ("int8", 0.85)):
        checks += [
            (f"{kernel} at {m} rows, share of copy bandwidth", share(kernel, m), ">=", bound) for m in (1, 16)
        ]
    checks += [
        (f"int4 at {m} rows over 1 row", over("int4", m, "int4", 1), "<=", b)
        for m, b in ((16, 1.1), (64, 1.25))
    ]
    for rows in (16, 32):
        rivals = {peer: us(peer, rows) for peer in PEERS}
        peer = min((name for name, time_us in rivals.items() if time_us), key=rivals.get, default="no peer")
        checks.append((f"int4 at {rows} rows over {peer}", over("int4", rows, peer, rows), "<=", 1.0))
    return judged(checks)


def judged(checks: Iterable[tuple[str, float | None, str, float]]) -> list[str]:
    """One line per (what, value, '>=' or '<=', bound)."""
    found = []
    for text, value, relation, bound in checks:
        if value is None:
            found.append(f"  ?    {text}: unmeasured (goal {relation} {bound:g})")
        else:
            good = value >= bound if relation == ">=" else value <= bound
            found.append(f"  {'ok  ' if good else 'MISS'} {text}: {value:.3f} (goal {relation} {bound:g})")
    return found


def readme(path: Path, results: Path) -> str:
    """Write the block 'gpu' of a file from the committed step times; returns its text."""
    lines = [line for file in sorted(results.glob("*-steps.jsonl")) for line in read_lines(file)]
    lines = [line for line in lines if not str(line.get("shape", "")).startswith("tiny")]
    text = table(lines)
    if text:
        cells = [line for line in lines if line.get("type") == "step_time" and "step_ms" in line]
        machines = []
        for env in {line["environment"]["device"]: line["environment"] for line in cells}.values():
            gpu, known = env["gpu"] or {}, env["versions"]
            machines.append(
                f"{env['device']} at {gpu.get('power.limit', '?')} W, driver {gpu.get('driver_version', '?')}, "
                f"torch {known['torch']}, triton {known['triton']}, commit {env['git']['commit']}"
            )
        text = (
            f"{'; '.join(machines)}. Random weights of real shapes: step times are measured, tok/s is the given tau over "
            f"the step time, not a measured rate.\n\n{text}"
        )
    text = text or "(unmeasured: no GPU result is committed; `make gpu` writes one to benchmarks/results)"
    replace_block(path, "gpu", text)
    return text


def main(argv: list[str] | None = None) -> int:
    """0: every part ran to its end; 1: a part failed or was killed; 2: usage."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    parser.add_argument("--full", action="store_true", help="everything; resumable")
    parser.add_argument("--seconds", type=float, help="limit of the whole run (default: that of its parts)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="bandwidth tests cold warm steps ..."
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny", action="store_true", help="with --device cpu: small shapes, to try the machinery"
    )
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="only rewrite this file's table of GPU results"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="with --readme: where the results lie")
    args = parser.parse_args(argv)
    if args.readme:
        print(readme(args.readme, args.results))
        return 0
    if (args.device == "cpu") != args.tiny:
        parser.error("--device cpu and --tiny go together")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error  make gpu needs a CUDA device, and this torch sees none. `make test` runs the rest.",
            file=sys.stderr,
        )
        return 2
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu tiny"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    log, steps = out / f"{name}.log", out / f"{name}-steps.jsonl"
    summary: dict[str, Any] = {"environment": environment(torch.device(args.device)), "parts": []}
    git = summary["environment"]["git"]
    git["commit"] = git["commit"] or os.environ.get("EAGLET_COMMIT")
    summary["command"] = " ".join(sys.argv)
    earlier = (
        finished([folder / f"{name}-summary.json" for folder in (RESULTS, out)], summary) if args.full else {}
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    began = time.time()
    cache = tempfile.mkdtemp(prefix="eaglet-gpu-")
    try:
        due = began
        for part in parts(args, out, name, cache):
            if part.name in earlier:
                summary["parts"].append(earlier[part.name])
                continue
            due += part.seconds
            until = min(due, began + args.seconds) if args.seconds else due
            seconds = until - time.time()
            if seconds < 5:
                summary["parts"].append(
                    {"part": part.name, "exit": "not started: no time left", "seconds": 0}
                )
                continue
            if part.name == "steps" and part.env and Path(cache, "start").exists():  # compiled once is enough
                with contextlib.suppress(OSError):
                    shutil.copytree(Path(cache, "start"), Path(cache, "shared"), dirs_exist_ok=True)
            ended = run_part(part, log, seconds)
            summary["parts"].append(ended)
            if part.name in ("cold", "warm") and isinstance(ended["exit"], str):
                append(steps, {"type": "start", "cache": part.name, "error": ended["exit"], "utc": utc()})
            summary["seconds"] = round(time.time() - began, 1)
            draft = out / f"{name}-summary.json.tmp"
            draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, out / f"{name}-summary.json")
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    lines = read_lines(steps)
    print(f"\n{table(lines)}\n\ngoals for an H100:\n" + "\n".join(goals(lines)))
    kernel_lines = read_lines(out / f"{name}-kernels.jsonl")
    print("kernels, LLaMA-3-8B layers together, goals for an H100:\n" + "\n".join(kernel_goals(kernel_lines)))
    for ended in summary["parts"]:
        print(f"{ended['part']:<10} exit {ended['exit']}  {ended['seconds']} s")
    failed = [ended["part"] for ended in summary["parts"] if ended["exit"] != 0]
    print(f"{'not complete: ' + ', '.join(failed) if failed else 'all parts ran'}; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
