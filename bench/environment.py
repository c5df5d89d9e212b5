"""What moves the numbers besides the code: the machine, the GPU's state, the model's weights, the memory of an engine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import Engine
from model import Transformer
from support.machine import describe_device

GPU_FIELDS = (
    "name,driver_version,power.limit,power.default_limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,"
    "utilization.gpu,memory.used,persistence_mode"
)


def parse_smi(line: str, processes: str, own: int) -> dict[str, Any]:
    """One CSV line of nvidia-smi and its list of compute processes as a dictionary."""

    def value(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    gpu = dict(zip(GPU_FIELDS.split(","), (value(v.strip()) for v in line.split(",")), strict=False))
    pids = [p.split(",")[0].strip() for p in processes.splitlines() if p.strip()]
    return gpu | {"other_processes": sum(p != str(own) for p in pids)}


def gpu_state(device: torch.device) -> dict[str, Any] | None:
    """Power cap, clocks, temperature and driver of the CUDA device. None on a CPU."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    which = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
    answers = []
    for query in (f"--query-gpu={GPU_FIELDS}", "--query-compute-apps=pid"):
        done = _output(["nvidia-smi", *which, query, "--format=csv,noheader,nounits"])
        if done is None:
            return {"name": torch.cuda.get_device_name(device), "error": "nvidia-smi gave no answer"}
        answers.append(done)
    return parse_smi(answers[0].splitlines()[0], answers[1], os.getpid())


def _output(command: list[str], cwd: Path | None = None) -> str | None:
    """What a command prints; None if it fails or prints nothing."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that moves the numbers."""
    here = Path(__file__).resolve().parent
    known = {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")}
    commit = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    dirty = commit and _output(["git", "status", "--porcelain", "--untracked-files=no"], here)
    return {
        "device": describe_device(device),
        "gpu": gpu_state(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # not on Windows
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **known, "cuda": torch.version.cuda},
        "git": {"commit": commit, "dirty": bool(dirty)},
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(model: Transformer) -> str:
    """A short hash of the weights: names, shapes and a sample of every tensor's values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{some.double().tolist()}".encode())
    return digest.hexdigest()[:16]


def memory_of(engine: Engine) -> int:
    """Bytes of every tensor that an engine needs (weights, head, caches, buffers), with each storage counted once."""
    storages: dict[int, int] = {}
    seen: dict[int, Any] = {}  # holds what was visited, because a freed object's id may come back
    left: list[Any] = [engine.model, engine.drafter, engine.state]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            if value.device.type != "meta":
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, dict):
                left += value.values()
            elif isinstance(value, list | tuple):
                left += value
            elif isinstance(value, nn.Module) or hasattr(value, "__dict__") and not callable(value):
                left += vars(value).values()
    return sum(storages.values())
