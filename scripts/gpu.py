"""Everything that needs a CUDA device, in one command: the GPU tests, the kernel micro-benchmarks, a decode comparison.

    make gpu                      # under 8 minutes; installs nothing, needs no network
    python -m scripts.gpu --full  # every layer shape and more rows; resumable by cell

Each part writes its own file under --out as it goes, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch


def run(title: str, command: list[str], log: Path, seconds: float) -> dict:
    """Run one part with a time limit; its output goes to `log` and its last lines to the terminal."""
    print(f"== {title}: {' '.join(command)}", flush=True)
    started = time.time()
    with open(log, "w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    tail = log.read_text(errors="replace").splitlines()[-15:]
    print("\n".join(tail), flush=True)
    return {"part": title, "exit": code, "seconds": round(time.time() - started, 1), "log": log.name}


def environment() -> dict:
    info = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name()}
    query = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        )
        info["nvidia_smi"] = found.stdout.strip()
    except OSError as error:
        info["nvidia_smi"] = f"not available: {error}"
    return info


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error  make gpu needs a CUDA device, and this torch sees none. `make test` runs the rest.",
            file=sys.stderr,
        )
        return 2
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    python = sys.executable
    quick = [] if args.full else ["--models", "llama-3-8b", "--m", "1", "8", "16", "32", "64"]
    parts = [
        ("GPU tests", [python, "-m", "pytest", "-m", "gpu", "-q", "tests"], 180),
        (
            "kernels",
            [python, "-m", "scripts.bench_kernels", "--json", str(out / f"{name}-kernels.jsonl"), *quick],
            200,
        ),
        (
            "decoding",
            [python, "-m", "scripts.bench", "--json", str(out / f"{name}-demo.jsonl"), "--reps", "2"],
            90,
        ),
    ]
    summary = {"environment": environment(), "command": " ".join(sys.argv), "parts": []}
    for title, command, seconds in parts:
        log = out / f"{name}-{title.replace(' ', '-').lower()}.log"
        summary["parts"].append(run(title, command, log, seconds * (20 if args.full else 1)))
        (out / f"{name}-summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    failed = [part["part"] for part in summary["parts"] if part["exit"] != 0]
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all parts ran'}; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
