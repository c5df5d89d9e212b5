"""Records of a benchmark: the machine, the JSON-lines file, and the rows of the summary that follow from its run lines.

The rows are recomputed from the run lines alone, so a committed file can be checked against its own table.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import torch

from bench.arms import OTHER_ENGINE, SAME_TOKENS
from decoding.params import SamplingParams
from engine.results import acceptance, n_alpha
from support.cache import version_of
from support.errors import UsageError
from support.files import read_json_lines
from support.machine import describe_device
from support.reader import check

Line = dict[str, Any]  # a run line of the JSON
Row = dict[str, Any]  # a row of the summary
# What is read again of the lines of a file, as shapes of `support.reader.check`.
PLACE = {"suite": str, "temperature": float, "arm": str}
RUN = PLACE | {"question": (str, int), "turn": int, "rep": int, "prompt_sha256": str, "ids_sha256": str}
RATES = {"tokens_per_second": (float, None), "tau": (float, None), "speedup": ({"median": (float, None)}, None)}
SUMMARY = dict.fromkeys(("environment", "settings", "model"), dict)
SUMMARY |= {"rows": [PLACE | RATES], "arms": [{"arm": str, "options": dict}]}


@dataclass
class Settings:
    """What one measurement is made of. Every field ends up in the JSON."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 64
    reps: int = 2
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    warmup_runs: int = 4
    max_seconds: float = 0.0  # past it no repetition starts, nor a question of the first one; 0: no limit
    random_weights: bool = False

    def params(self, temperature: float, rep: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Repetition r draws with seed + r, so that sampling sees several texts; greedy repeats the same one."""
        limits = {"max_new_tokens": self.max_new_tokens, "stop_ids": stop_ids}
        return SamplingParams(temperature, self.top_k, self.top_p, seed=self.seed + rep, **limits)


class Lines:
    """A JSON-lines file that is complete after every line.

    It is called PATH.part until it is closed, so a run that was killed leaves its lines there, and so does one that was
    interrupted where PATH holds an earlier one. The path "-" or None means that there is no file.
    """

    def __init__(self, path: str | None):
        self.path = path if path and path != "-" else None
        self.file: TextIO | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Add a line and hand it to the system."""
        if self.path:
            self.file = self.file or open(f"{self.path}.part", "w", buffering=1, encoding="utf-8")
            self.file.write(json.dumps(line) + "\n")

    def close(self, interrupted: bool = False) -> str | None:
        """Give the file its name. Returns the name that it has then."""
        if not self.file:
            return None
        os.fsync(self.file.fileno())
        self.file.close()
        if interrupted and os.path.exists(self.path):
            return f"{self.path}.part"
        os.replace(f"{self.path}.part", self.path)
        return self.path


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(run lines, summary line) of a file written by --json. Raises ValueError if it is not one."""
    lines = read_json_lines(path)
    runs = [check(line, RUN, path, "a run") for line in lines if line.get("type") == "run"]
    summaries = [check(line, SUMMARY, path, "the summary") for line in lines if line.get("type") == "summary"]
    if not summaries:
        raise UsageError(f"{path}: not a file of scripts.bench --json (no summary line).")
    return runs, summaries[-1]


# ---- the machine --------------------------------------------------------------------------------------------

COMMIT = "EAGLET_COMMIT"  # the variable that names the commit where Git cannot
GPU_FIELDS = (
    "name,driver_version,power.limit,power.default_limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,"
    "utilization.gpu,memory.used,persistence_mode"
)


def parse_smi(line: str, processes: str, own: int) -> dict[str, Any]:
    """One CSV line of nvidia-smi and its list of compute processes as a dictionary."""
    gpu: dict[str, Any] = dict(zip(GPU_FIELDS.split(","), map(str.strip, line.split(",")), strict=False))
    for name, text in gpu.items():
        with contextlib.suppress(ValueError):
            gpu[name] = float(text)
    pids = [p.split(",")[0].strip() for p in processes.splitlines() if p.strip()]
    return gpu | {"other_processes": sum(p != str(own) for p in pids)}


def gpu_state(device: torch.device) -> dict[str, Any] | None:
    """Power cap, clocks, temperature and driver of the CUDA device. None on a CPU."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", "--format=csv,noheader,nounits"]
    state = _output([*command, f"--query-gpu={GPU_FIELDS}"])
    if not state:
        return {"name": torch.cuda.get_device_name(device), "error": "nvidia-smi gave no answer"}
    return parse_smi(state.splitlines()[0], _output([*command, "--query-compute-apps=pid"]), os.getpid())


def _output(command: list[str]) -> str:
    """What a command prints when it runs in this folder; nothing if it fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def source() -> dict[str, Any]:
    """The commit of this project and whether it was modified: what $EAGLET_COMMIT says, or else Git.

    A copy without a .git folder may lie in another repository, whose commit would say nothing.
    """
    if given := os.environ.get(COMMIT):
        return {"commit": given, "dirty": None}
    if _output(["git", "rev-parse", "--show-toplevel"]) != str(Path(__file__).resolve().parent.parent):
        return {"commit": None, "dirty": None}
    dirty = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return {"commit": _output(["git", "rev-parse", "--short=12", "HEAD"]) or None, "dirty": bool(dirty)}


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that moves the numbers."""
    names = "torch triton transformers xllamacpp ik-llama-cpp-python numpy".split()
    known = {name: version_of(name) for name in names}
    return {
        "device": describe_device(device),
        "gpu": gpu_state(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": None if sys.platform == "win32" else os.getloadavg()[0],
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **known, "cuda": torch.version.cuda},
        "git": source(),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# ---- from run lines to rows ----------------------------------------------------------------------------------

RESAMPLES = 2000


def total_rate(lines: Sequence[Line], whole: bool = False) -> float | None:
    """Tokens per second of decoding, or (whole) of the requests with their prompts; None without tokens or time.

    Decoding counts the ids after the first and the time after the first.
    """
    tokens = sum(r["new_tokens"] - (0 if whole else 1) for r in lines)
    seconds = sum(r["decode_seconds"] + (r["ttft_seconds"] if whole else 0.0) for r in lines)
    return tokens / seconds if tokens and seconds else None


def bootstrap(ratios: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % interval of the median: the 2.5 and 97.5 percentiles of medians of `random.Random(seed).choices`."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[math.ceil(0.975 * RESAMPLES) - 1]


question_of = itemgetter("suite", "question", "turn")  # what a line asked
pair_of = itemgetter("suite", "question", "turn", "rep", "temperature")  # what the runs of one round have in common


def summarise(runs: Sequence[Line], settings: Settings) -> list[Row]:
    """One row per (suite, temperature, arm), the baseline first; with several suites also a suite "all"."""
    suites = list(dict.fromkeys(r["suite"] for r in runs))
    suites += ["all"] if len(suites) > 1 else []
    temperatures = dict.fromkeys(r["temperature"] for r in runs)
    arms = dict.fromkeys(r["arm"] for r in sorted(runs, key=lambda r: not r["baseline"]))
    rows = []
    for suite, T, arm in itertools.product(suites, temperatures, arms):
        here = [r for r in runs if r["temperature"] == T and suite in ("all", r["suite"])]
        if lines := [r for r in here if r["arm"] == arm]:
            plain = [r for r in here if r["baseline"]]
            row = {"suite": suite, "temperature": T} | _measured(lines, plain)
            rows.append(row | _compared(row, lines, plain, settings.seed))
    return rows


def _measured(lines: Sequence[Line], plain: Sequence[Line]) -> dict[str, Any]:
    """What an arm's lines say: speed, acceptance, and the time of a step beside that of plain decoding."""
    step, plain_step = _step_seconds(lines), _step_seconds(plain)
    per_rep = [total_rate([r for r in lines if r["rep"] == rep]) for rep in sorted({r["rep"] for r in lines})]
    per_rep = [rate for rate in per_rep if rate]
    verdicts = [r["same"] for r in lines]
    row = {name: lines[0][name] for name in ("arm", "label", "baseline")} | {
        "prompts": len({question_of(r) for r in lines}), "runs": len(lines),
        "prompt_tokens": statistics.mean(r["prompt_tokens"] for r in lines),
        "new_tokens": sum(r["new_tokens"] for r in lines),
        "tokens_per_second": total_rate(lines), "request_tokens_per_second": total_rate(lines, whole=True),
        "tokens_per_second_sd": statistics.stdev(per_rep) if len(per_rep) > 1 else None,
        "ttft_ms": 1e3 * statistics.median(r["ttft_seconds"] for r in lines),
        "steps": None, "tau": None, "accepted_by_depth": None, "n_alpha": None,
        "step_ms": 1e3 * step if step else None, "break_even_tau": None,
        "same": None if lines[0]["baseline"] else {k: verdicts.count(k) for k in ("same", "tie", "differs")},
    }  # fmt: skip
    if all(r["tokens_per_step"] is not None for r in lines):
        steps = [n for r in lines for n in r["tokens_per_step"]]
        whole = [n for r in lines for n in r["tokens_per_step"][:-1]]  # the last step may have been cut short
        tau, by_depth = acceptance(steps)
        row |= {"steps": len(steps), "tau": tau, "accepted_by_depth": by_depth}
        row["n_alpha"] = n_alpha(whole, min(lines[0].get("depth") or 0, 5))
        row["break_even_tau"] = step / plain_step if step and plain_step else None
    return row


def _step_seconds(lines: Sequence[Line]) -> float | None:
    """Seconds per step. An engine that does not tell its steps emits one token in each."""
    steps = sum(r["new_tokens"] - 1 if r["tokens_per_step"] is None else len(r["tokens_per_step"]) for r in lines)
    return sum(r["decode_seconds"] for r in lines) / steps if steps else None


def _compared(row: Row, lines: Sequence[Line], plain: Sequence[Line], seed: int) -> dict[str, Any]:
    """An arm's speedup over plain decoding, or in `blocked` why there is none. The baseline has neither."""
    if row["baseline"]:
        return {"speedup": None, "blocked": None}
    base = {pair_of(r): r for r in plain}
    pairs = [(r, base[pair_of(r)]) for r in lines if pair_of(r) in base]
    ratios: dict[tuple, list[float]] = defaultdict(list)
    for ours, theirs in pairs:
        rates = total_rate([ours]), total_rate([theirs])
        if all(rates):
            ratios[question_of(ours)].append(rates[0] / rates[1])
    blocked = _blocked(row, lines[0]) or (None if ratios else "no run decoded more than one token")
    if blocked:
        return {"speedup": None, "blocked": blocked}
    per_prompt = [statistics.median(values) for values in ratios.values()]
    mine, theirs = zip(*pairs, strict=True)
    low, high = bootstrap(per_prompt, seed)
    speedup = {
        "median": statistics.median(per_prompt), "low": low, "high": high, "per_prompt": per_prompt,
        "total": total_rate(mine) / total_rate(theirs),
        "request": total_rate(mine, True) / total_rate(theirs, True),
        "ttft": statistics.median(m["ttft_seconds"] / t["ttft_seconds"] for m, t in pairs),
    }  # fmt: skip
    return {"speedup": speedup, "blocked": None}


def _blocked(row: Row, line: Line) -> str | None:
    """Why an arm's ratio would mislead, or None; `line` is one of its runs."""
    depth = line.get("depth")
    if line["random_weights"] and depth != 0 and row["label"] != OTHER_ENGINE:
        return "random weights: acceptance means nothing"
    if row["label"] == SAME_TOKENS and row["same"]["differs"]:
        return f"DIFFERS {row['same']['differs']}/{row['runs']}"
    if depth and row["tau"] == 1:
        cost = f"{1 / row['break_even_tau']:.2f}x" if row["break_even_tau"] else "unknown"
        return f"ACCEPTED NOTHING: the drafter is broken or lost here; plain decoding's speed times {cost}"
    return None


def broken(row: Row) -> bool:
    """Whether an arm promised the tokens of plain decoding and gave others."""
    return row["label"] == SAME_TOKENS and bool(row["same"]) and row["same"]["differs"] > 0


def remarks(rows: Sequence[Row], runs: Sequence[Line], facts: Sequence[dict]) -> list[str]:
    """What a reader should not overlook: broken promises, drafters that accept nothing or cost time, unsteady steps."""
    random_weights = bool(runs) and runs[0]["random_weights"]
    drafting = set() if random_weights else {f["arm"] for f in facts if f.get("depth")}
    notes, slow = [], []
    for row in rows:
        where = f"{row['arm']} on {row['suite']}, T = {row['temperature']:g}"
        if broken(row):
            notes.append(f"{where}: {row['same']['differs']} of {row['runs']} runs DIFFER from plain decoding")
        if row["same"] and row["same"]["tie"]:
            notes.append(f"{where}: {row['same']['tie']} of {row['runs']} runs fork at a near-tie (rounding)")
        if row["arm"] in drafting and row["steps"] and not row["accepted_by_depth"]:
            notes.append(f"{where}: accepted nothing (tau 1.00): a broken drafter, or one of another model")
        elif row["arm"] in drafting and row["break_even_tau"] and row["tau"] < row["break_even_tau"]:
            slow.append(f"{where} (tau {row['tau']:.2f} < {row['break_even_tau']:.2f})")
    if slow:
        notes.append(f"tau below break-even, speculation costs time: {'; '.join(slow)}")
    return notes
