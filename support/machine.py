"""TODO."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import torch


def peak_memory() -> int | None:
    """Highest resident memory of this process so far, bytes; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def size(count: float) -> str:
    """Bytes for people, decimal units."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # counts what the page cache would give back, for example a checkpoint just read
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read + write) of a large copy: the ceiling that the report's shares refer to."""
    count = (1 << 28) if device.type == "cuda" else (1 << 24)
    source = torch.zeros(count, dtype=torch.float32, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
