"""What moves the numbers besides the code: the machine, its software, and the state of its GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from support.machine import describe_device

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
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", "-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", "--format=csv,noheader,nounits"]
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


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that moves the numbers."""
    known = dict.fromkeys(("torch", "triton", "transformers", "llama-cpp-python", "numpy"))
    for name in known:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    commit = _output(["git", "rev-parse", "--short=12", "HEAD"])
    dirty = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "device": describe_device(device),
        "gpu": gpu_state(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": None if sys.platform == "win32" else os.getloadavg()[0],
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **known, "cuda": torch.version.cuda},
        "git": {"commit": commit or None, "dirty": bool(dirty)},
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
