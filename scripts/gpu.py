"""Everything that needs a CUDA device, in one command: step times, tests, decoding, tilings, start.

    make gpu                                       # installs nothing, needs no network
    python -m scripts.gpu --only steps             # one part
    python -m scripts.gpu --device cpu --tiny      # tries the machinery on small shapes; measures nothing

Every part is a process of its own with a time limit. What a part measured is kept whatever happens to it or after it:
each writes as it goes into the folder --out. A part that takes too long is interrupted as by Ctrl-C, and killed 10
seconds later. One that needs a package which is missing says so in one line. torch and numpy are enough for the step
times, the peers and the start. NAME is the GPU's. A file of a part that was killed ends in .part.

    NAME-first.jsonl     the step time of plain decoding, after seconds   (scripts.bench --steps)
    NAME-steps-*.jsonl   step times of real shapes with random weights, and the microseconds of every kernel
    NAME-peer-*.jsonl    plain decoding of a real shape beside torch's own int4 kernel and beside transformers,
                        and beside torchao and gemlite where they are installed
    NAME-demo.jsonl      the demo model's decoders against each other
    NAME-tilings         the fastest tiling of every layer shape          (scripts.tune_kernels)
    NAME-start-*.jsonl   one short request with empty caches of compiled kernels, and with filled ones
    NAME-summary.json    the machine, the parts, how they ended and how long they took
    NAME.log             everything that the parts printed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.records import environment
from support.errors import UsageError, command_parser, run_command
from support.files import write_json

ROOT = Path(__file__).resolve().parent.parent
FILES = ("safetensors", "sentencepiece")  # read the demo model
GRACE = 10.0  # seconds between the interrupt and the kill
LOOK = 0.5  # seconds between two looks at what a part wrote
SKIPPED = "skipped"


class Part(NamedTuple):
    """A command, its time limit in seconds, and the modules without which it cannot run."""

    name: str
    command: list[str]
    seconds: float
    needs: tuple[str, ...] = ()


def parts(out: Path, name: str, tiny: bool) -> list[Part]:
    """What to run, most important first."""
    python = [sys.executable, "-m"]
    bench = [*python, "scripts.bench", "-q", *(["--device", "cpu"] if tiny else ["--compile"])]
    shapes = {"tiny": ("tiny", 3)} if tiny else {"l2-7b": ("llama-2-7b", 1), "l3-8b": ("llama-3-8b", 3)}
    trees = ("dynamic:16,5,8", "dynamic:24,6,8", "dynamic:60,7,10")[: 1 if tiny else 3]

    usual = "tiny" if tiny else "llama-2-7b"

    def written(kind: str) -> list[str]:
        return ["--json", str(out / f"{name}-{kind}.jsonl")]

    def random(shape: str, quant: str) -> list[str]:
        return ["--shape", shape, *(["--quant", quant] if quant else [])]

    def steps(kind: str, shape: str, quant: str, arms: list[str], contexts: str, ctx: str) -> list[str]:
        return [*random(shape, quant), *arms, "--steps", contexts, "--ctx", ctx, *written(kind)]

    def peer(library: str, quant: str, seconds: float, *needs: str) -> Part:
        kind, much = f"peer-{library}", "--temperature 0 --reps 2 --max-seconds 40 --only plain".split()
        command = [*bench, "--baseline", library, *much, *random(usual, quant), *written(kind)]
        return Part(kind, command, seconds, needs)

    # Step times are captured without --compile, which takes minutes.
    timed = [*python, "scripts.bench", "-q", *(["--device", "cpu"] if tiny else [])]
    near, far = (("32", "128"), ("32", "128")) if tiny else (("128", "4096"), ("128,2048", "4096"))
    only = ["--only", "plain"]
    run = [Part("first", [*timed, *steps("first", usual, "int4", only, *near)], 90)]
    for quant, (short, (shape, version)) in itertools.product(("int4",) if tiny else ("int4", ""), shapes.items()):
        kind = f"steps-{short}-{quant or 'half'}"
        arms = [word for tree in trees for word in ("--arm", f"{tree}=eagle=random:{version};tree={tree}")]
        run.append(Part(kind, [*timed, *steps(kind, shape, quant, arms, *far)], 150))
    tests = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_kernels_gpu.py", "tests/test_engine_gpu.py"]
    run.append(Part("tests", [*python, "pytest", *tests, *["--collect-only"] * tiny], 300, FILES + ("pytest",)))
    one = "--limit 1 --max-new-tokens 8 --reps 1 --temperature 0 --only plain"
    run += [peer("torch", "int4", 240), peer("hf", "", 150, "transformers")]
    run += [peer("torchao", "int4", 240, "torchao"), peer("gemlite", "int4", 240, "gemlite", "torchao")]
    demo = one if tiny else "--max-seconds 60"
    run.append(Part("demo", [*bench, *demo.split(), *written("demo")], 150, FILES))
    tilings = ["--models", "llama-2-7b", "llama-3-8b", "--seconds", "200", "--tuned", str(out / f"{name}-tilings")]
    run.append(Part("tilings", [*python, "scripts.tune_kernels", *(["--help"] if tiny else tilings)], 240, ("triton",)))
    caches = [f"{key}={out / f'{name}-caches'}" for key in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    for kind in ("start-cold", "start-warm"):  # the second one finds what the first one compiled
        request = [*random(usual, "int4"), *one.split(), *written(kind)]
        run.append(Part(kind, ["env", *caches, *bench, *request], 150))
    return run


def run_part(part: Part, log: Path) -> dict[str, Any]:
    """Run one part with its output in `log`, whose new lines go to the terminal at once. Says how it ended."""
    line: dict[str, Any] = {"part": part.name, "ended": "", "seconds": 0.0, "command": part.command}
    if missing := [module for module in part.needs if importlib.util.find_spec(module) is None]:
        print(f"== {part.name}: skipped, because {' and '.join(missing)} cannot be imported", flush=True)
        return line | {"ended": SKIPPED, "missing": missing}
    print(f"== {part.name}: {' '.join(part.command)}  (at most {part.seconds:.0f} s)", flush=True)
    began = time.monotonic()
    with log.open("a", encoding="utf-8") as out, log.open(encoding="utf-8", errors="replace") as new:
        new.seek(0, os.SEEK_END)
        process = subprocess.Popen(part.command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - began < part.seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                print(new.read(), end="", flush=True)
            late = process.poll() is None
        finally:
            end(process)
        print(new.read(), flush=True)
    ended = f"stopped after {part.seconds:.0f} s" if late else process.returncode
    return line | {"ended": ended, "seconds": round(time.monotonic() - began, 1)}


def end(process: subprocess.Popen) -> None:
    """Interrupt a process and its children, so that it writes what it has, and kill what is left of them."""
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def run(args: argparse.Namespace) -> int:
    """Run the parts one after another. Returns 1 if one of them failed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("this torch sees no CUDA device; --device cpu --tiny tries the machinery.")
    if args.device == "cpu" and not args.tiny:
        raise UsageError("--device cpu needs --tiny: on a CPU this measures nothing.")
    device = torch.device(args.device)
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu-tiny")
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(args.out, name, args.tiny) if not args.only or part.name in args.only]
    if not chosen:
        names = ", ".join(part.name for part in parts(args.out, name, args.tiny))
        raise UsageError(f"--only {' '.join(args.only)}: the parts are {names}.")
    shutil.rmtree(args.out / f"{name}-caches", ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended, too
    summary: dict[str, Any] = {"environment": environment(device), "parts": []}
    for part in chosen:
        try:
            summary["parts"].append(run_part(part, args.out / f"{name}.log"))
        finally:
            write_json(args.out / f"{name}-summary.json", summary)
    failed = [line["part"] for line in summary["parts"] if line["ended"] not in (0, SKIPPED)]
    print(f"results in {args.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.gpu", __doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the results")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
