"""Everything that needs a CUDA device, in one visit to a machine with one: what compiles or checks, then what is timed.

    make gpu                                                 # nine minutes; installs nothing, needs no network
    python -m scripts.gpu --seconds 300 --only int4 demo     # some parts, in less time
    python -m scripts.gpu --device cpu --tiny --seconds 60   # tries the machinery on small shapes; measures nothing

First the checks run side by side on all cores, together with an untimed run of every benchmark, so that its kernels are
compiled. Then the benchmarks run again, one at a time, and their times count. Every part is a process of its own with a
time limit. One that takes too long is interrupted as by Ctrl-C, and killed a little later. What it wrote until then is
kept. A part that lacks a package or memory, or that the time does not suffice for, is named. Torch and numpy are enough
for the step times and for torch's own int4 kernel. SmolLM2 is measured where its wheel or $EAGLET_SMOLLM2 has its file.
The records name the commit that $EAGLET_COMMIT says, where Git cannot.

Three files are written to the folder --out, again after each part, so that a visit that is cut short loses nothing:

    NAME-summary.json      the machine, the parts, how they ended, how long they took, and the last lines they printed
    NAME-records.tar.gz    what scripts.bench and scripts.tune_kernels measured, one file for each part
    NAME-logs.tar.gz       everything that the parts printed
"""

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.records import environment
from bench.suites import find_model
from support.errors import UsageError, at_least, command_parser, run_parsed
from support.files import write_json, written_whole
from support.interrupts import held_back

ROOT = Path(__file__).resolve().parent.parent
FILES = ("safetensors", "sentencepiece")  # read the demo model
USUAL = 540.0  # seconds for which the limits of the parts are made
CHECKING = 0.35  # share of the time that checks and untimed runs may take
GRACE = 5.0  # seconds between the interrupt and the kill
LOOK = 0.2  # seconds between two looks at what runs
LEAST = 4.0  # seconds without which no part is begun
LAST_LINES = 16
COMPILE = "--limit 1 --reps 1 --max-seconds 1".split()  # what a benchmark does where nothing is timed
SKIPPED, UNDONE = "skipped", "not begun"


class Part(NamedTuple):
    """A command with a limit in seconds (of a visit of USUAL seconds), the modules that it needs, and gigabytes of the
    device's memory that it may take. `{records}` in the command stands for the folder of its records, and `{work}` for
    one that is deleted after the visit."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    gigabytes: float = 2.0


# ---- the parts ----------------------------------------------------------------------------------------------


def checks(tiny: bool, workers: int) -> list[Part]:
    """What compares, the most important first: a row with itself in wider forwards, then kernels with references."""
    equal = "independent or rows or alone or slots or plain_decoding"
    shared = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") and not tiny else []
    pytest = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *shared, *["--collect-only"] * tiny]
    found = []
    for what, file in itertools.product((equal,) if tiny else (equal, f"not ({equal})"), ("engine", "kernels")):
        name = f"{'equal' if what == equal else 'tests'}-{file}"
        command = (sys.executable, "-m", "pytest", *pytest, f"tests/test_{file}_gpu.py", "-k", what)
        found.append(Part(name, command, 150, (*FILES, "pytest"), 1.5 * (workers if shared else 1)))
    how = "--max-new-tokens 16 --device cpu" if tiny else "--max-new-tokens 100 --compile --check"
    prove = f"generate.py -p def --eagle demo/eagle3 --prove {how}".split()
    return [*found, Part("prove", (sys.executable, *prove), 90, FILES)]


def timed(device: str, tiny: bool) -> list[Part]:
    """What measures, the most important first. SmolLM2 is measured if its file is there. The last two parts are one short
    request with an empty cache folder, and one that finds what the first one compiled and compared."""
    usual, experts = ("tiny", "tiny-moe") if tiny else ("llama-3-8b", "mixtral-8x7b")
    ctx, prompts = ("128", "32") if tiny else ("4096", "500,2000")
    int4, steps = f"--shape {usual} --quant int4", f"--ctx {ctx} --steps {'32' if tiny else '128,2048'}"
    heads = "--arm e3-16=eagle=random:3;tree=dynamic:16,5,8 --arm e3-60=eagle=random:3;tree=dynamic:60,7,10"
    mtp = "--arm mtp-3=eagle=mtp;tree=chain:3 --arm mtp-16=eagle=mtp;tree=dynamic:16,5,8"
    texts = "--limit 1 --reps 1 --max-new-tokens 8 --temperature 0" if tiny else "--limit 4 --reps 2 --max-seconds 40"
    compiled = "" if tiny else "--compile"  # a step is captured for --steps in any case
    smollm2 = find_model()
    asked = f"--only plain --clients 1 --max-new-tokens 16 --prompt-tokens {prompts} --ctx {ctx}"
    benchmarks = [  # name, seconds, gigabytes, options
        ("int4", 40, 8, f"{int4} {heads} {steps}"),
        ("demo", 70, 2, f"{compiled} {texts} {'--only plain' * tiny}"),
        ("smollm2", 70, 3, f"{compiled} {texts}"),
        ("prompts", 60, 8, f"{compiled} {int4} {asked}"),
        ("torch-int4", 70, 16, f"{compiled} {int4} --baseline torch --only plain {texts} --temperature 0"),
        ("bf16", 40, 20, f"--shape {usual} {heads} {steps}"),
        ("int8", 40, 12, f"--shape {usual} --quant int8 {heads} {steps}"),
        ("l2-7b-int4", 40, 7, f"--shape llama-2-7b --quant int4 {heads} {steps}"),
        ("q35-9b-int4", 40, 10, f"--shape qwen3.5-9b --quant int4 {mtp} {steps}"),
        ("mixtral-int4", 40, 28, f"--shape {experts} --quant int4 --only plain {steps}"),
    ]
    left_out = ["bf16", "int8", "l2-7b-int4", "q35-9b-int4"] if tiny else []
    left_out += [] if smollm2 else ["smollm2"]
    own = {"smollm2": ["--checkpoint", str(smollm2), "--arm", f"e3=eagle={ROOT / 'heads' / 'smollm2-eagle3'}"]}
    parts = []
    for name, seconds, gigabytes, options in (benchmark for benchmark in benchmarks if benchmark[0] not in left_out):
        words = ["-q", "--device", device, *options.split(), *own.get(name, []), "--json", f"{{records}}/{name}.jsonl"]
        needs = () if "--shape" in words else FILES
        parts.append(Part(name, (sys.executable, "-m", "scripts.bench", *words), seconds, needs, gigabytes))
    tilings = ["--help"] if tiny else ["--models", usual, "--seconds", "50", "--tuned", "{records}/tilings"]
    parts.append(Part("tilings", (sys.executable, "-m", "scripts.tune_kernels", *tilings), 70, ("triton",), 4))
    cache = "TRITON_CACHE_DIR" if tiny else "EAGLET_CACHE"  # the latter has the C++ kernels of CPUs, too
    request = f"generate.py --eagle demo/eagle3 -p The --max-new-tokens 8 --device {device} {compiled}".split()
    command = ("env", f"{cache}={{work}}/caches", sys.executable, *request)
    return [*parts, *(Part(f"start-{kind}", command, 60, FILES) for kind in ("cold", "warm"))]


# ---- running them -------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A part whose process runs."""

    part: Part
    process: subprocess.Popen
    log: Path
    began: float
    until: float


@dataclass
class Visit:
    """Runs parts, and saves after each what all of them gave. Times are those of time.monotonic()."""

    out: Path
    name: str
    summary: dict[str, Any]
    gigabytes: float  # of the device
    scale: float  # of the parts' limits
    work: Path  # a folder that is deleted after the visit

    def run(self, parts: Sequence[Part], phase: str, width: int, until: float) -> None:
        """Run parts, at most `width` of them and as many as memory holds at a time, and none after `until`."""
        waiting, running = list(parts), []
        for folder in (self.work / "logs", self.work / phase):
            folder.mkdir(exist_ok=True)
        try:
            while waiting or running:
                while waiting and (not running or self._fits(waiting[0], running, width)):
                    part = waiting.pop(0)
                    if why := self._obstacle(part, until):
                        self._note(part, phase, *why)
                    else:
                        with held_back(signal.SIGINT, signal.SIGTERM):  # until the part is among those to be ended
                            running.append(self._start(part, phase, until))
                for one in [one for one in running if one.process.poll() is not None or time.monotonic() > one.until]:
                    running.remove(one)
                    self._finish([one], phase)
                time.sleep(LOOK)
        finally:
            self._finish(running, phase)
            for part in waiting:
                self._note(part, phase, UNDONE, "the visit was cut short")
            self.save()

    def _fits(self, part: Part, running: list[Running], width: int) -> bool:
        taken = sum(one.part.gigabytes for one in running)
        return len(running) < width and taken + part.gigabytes <= self.gigabytes

    def _obstacle(self, part: Part, until: float) -> tuple[str, str] | None:
        """Why a part cannot be begun: how that counts, and in words."""
        if missing := [module for module in part.needs if importlib.util.find_spec(module) is None]:
            return SKIPPED, f"{' and '.join(missing)} cannot be imported"
        if part.gigabytes > self.gigabytes:
            return SKIPPED, f"it needs {part.gigabytes:.0f} GB of memory, and the device has {self.gigabytes:.0f}"
        if time.monotonic() > until - LEAST:
            return UNDONE, "the time is over; a larger --seconds or --only gives it some"
        return None

    def _start(self, part: Part, phase: str, until: float) -> Running:
        log = self.work / "logs" / f"{phase}-{part.name}.log"
        records, work = str(self.work / phase), str(self.work)
        command = [word.replace("{records}", records).replace("{work}", work) for word in part.command]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": ROOT, "env": environment}
            process = subprocess.Popen(command, start_new_session=True, **how)
        now = time.monotonic()
        return Running(part, process, log, now, min(until, now + part.seconds * self.scale))

    def _finish(self, ended: list[Running], phase: str) -> None:
        """End parts that still run, and note how all of these ended."""
        now, late = time.monotonic(), [one for one in ended if one.process.poll() is None]
        end([one.process for one in late])
        for one in ended:
            seconds = now - one.began
            lines = one.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            how = f"stopped after {seconds:.0f} s" if one in late else one.process.returncode
            self._note(one.part, phase, how, "", round(seconds, 1), lines)
        if ended:
            self.save()

    def _note(
        self, part: Part, phase: str, ended: str | int, why: str, seconds: float = 0.0, lines: Sequence[str] = ()
    ) -> None:
        about = {"part": part.name, "phase": phase, "ended": ended, "why": why, "seconds": seconds}
        self.summary["parts"].append(about | {"command": part.command, "last_lines": list(lines)})
        state = f"{ended}, because {why}" if why else ended
        if isinstance(ended, int):
            state = f"FAILED with exit code {ended}" if ended else f"done after {seconds:.0f} s"
        print(f"{phase} {part.name}: {state}", flush=True)
        if phase == "timed" or ended not in (0, SKIPPED, UNDONE):
            print("".join(f"    {line}\n" for line in lines), end="", flush=True)

    def save(self) -> None:
        """Write the three files."""
        write_json(self.out / f"{self.name}-summary.json", self.summary)
        for kind, folder in (("records", "timed"), ("logs", "logs")):
            pack(self.work / folder, self.out / f"{self.name}-{kind}.tar.gz")


def pack(folder: Path, archive: Path) -> None:
    """Pack the files of a folder, which may be written meanwhile. The name of an unfinished record ends in .part."""
    with written_whole(archive) as part, tarfile.open(part, "w:gz") as packed:
        for file in sorted(folder.glob("*")):
            with contextlib.suppress(FileNotFoundError):
                packed.add(file, f"{archive.name.removesuffix('.tar.gz')}/{file.name}")


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Interrupt processes and their children, so that they write what they have, and kill what is left of them."""
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
        until = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def run(args: argparse.Namespace) -> int:
    """Run the parts. Returns 1 if one of them failed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("this torch sees no CUDA device; --device cpu --tiny tries the machinery.")
    if args.device == "cpu" and not args.tiny:
        raise UsageError("--device cpu needs --tiny: on a CPU this measures nothing.")
    began, device, cores = time.monotonic(), torch.device(args.device), os.cpu_count() or 1
    cuda = device.type == "cuda"
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device) if cuda else "cpu-tiny")
    args.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"environment": environment(device), "seconds": args.seconds, "parts": []}
    gigabytes = torch.cuda.get_device_properties(device).total_memory / 1e9 if cuda else math.inf
    alone = timed(args.device, args.tiny)
    untimed = checks(args.tiny, max(1, cores // 4))
    untimed += [p._replace(command=(*p.command, *COMPILE)) for p in alone if "scripts.bench" in p.command]
    known = list(dict.fromkeys(part.name for part in untimed + alone))
    if unknown := [part for part in args.only if part not in known]:
        raise UsageError(f"--only {' '.join(unknown)}: the parts are {', '.join(known)}.")
    untimed, alone = ([p for p in parts if not args.only or p.name in args.only] for parts in (untimed, alone))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the parts that run are ended, too
    with tempfile.TemporaryDirectory(prefix="eaglet-gpu-", ignore_cleanup_errors=True) as work:
        visit = Visit(args.out, name, summary, gigabytes, max(1.0, args.seconds / USUAL), Path(work))
        visit.run(untimed, "untimed", cores, began + args.seconds * CHECKING)
        visit.run(alone, "timed", 1, began + args.seconds - GRACE)
    failed = [f"{p['phase']} {p['part']}" for p in summary["parts"] if p["ended"] not in (0, SKIPPED, UNDONE)]
    undone = [p["part"] for p in summary["parts"] if p["ended"] == UNDONE]
    sums = [f"; {what}: {', '.join(parts)}" for what, parts in (("failed", failed), (UNDONE, undone)) if parts]
    print(f"results in {args.out}/{name}-*{''.join(sums)}")
    return int(bool(failed))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.gpu", __doc__)
    add = parser.add_argument
    add("--seconds", type=at_least(1), default=int(USUAL), metavar="N", help="time of the whole visit (default: 540)")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tiny", action="store_true", help="small shapes and few repetitions")
    add("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    add("--out", type=Path, default=ROOT / "results", help="folder of the results")
    return run_parsed(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
