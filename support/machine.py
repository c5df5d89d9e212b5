"""This machine: its device, memory, bandwidth and versions, and taking no more of its memory than is needed."""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# by the names of /proc/cpuinfo, the best first
VECTORS = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "avx2": "AVX2"}


def size_text(count: float) -> str:
    """A number of bytes for people, in decimal units."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def default_device() -> str:
    """The kind of device that is used where nothing else was asked for: "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_threads() -> int:
    """CPU threads for torch: OMP_NUM_THREADS if it is set, else the physical cores that this process may use.

    Two threads of one core share its arithmetic units, so more threads than cores make products slower. More threads than
    a container's quota pays for are stopped in the middle of their work. Where the system does not tell (outside Linux),
    it is the number that torch has now.
    """
    # a list has a number for each nesting level
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    if sys.platform != "linux":
        return torch.get_num_threads()
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {tuple(_lines_of(topology.format(cpu))) for cpu in os.sched_getaffinity(0)}
    count = torch.get_num_threads() if () in cores else len(cores)
    return max(1, min(count, int(cpu_quota(count))))


def cpu_quota(most: float) -> float:
    """How many CPUs' worth of time the control groups of this process let it have, at most `most`."""
    root = Path("/sys/fs/cgroup")
    group = next((line[4:] for line in _lines_of("/proc/self/cgroup") if line.startswith("0::/")), "")
    folders = [folder for folder in (root / group, *(root / group).parents) if folder.is_relative_to(root)]
    # "200000 100000" or "max ..."
    limits = [line.split() for folder in folders for line in _lines_of(f"{folder}/cpu.max")]
    version_1 = [_lines_of(f"{root}/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    limits += [[quota, period] for quota, period in zip(*version_1, strict=False) if quota != "-1"]
    return min([most, *(int(quota) / int(period) for quota, period in limits if quota != "max")])


def release_threads() -> None:
    """Give back the threads that OpenMP keeps for the calling thread. Its next operation starts new ones.

    Every thread that calls torch keeps a team of its own. Where the teams together have more threads than there are CPUs,
    GNU's OpenMP no longer lets them wait busily, and decoding was measured at a third of its speed. Other OpenMP
    libraries than GNU's have no such rule, so nothing is done there.
    """
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the one that torch has loaded
    except (OSError, AttributeError):
        return
    library.omp_pause_resource_all(1)  # 1: omp_pause_soft, which keeps the settings


def describe_device(device: torch.device) -> str:
    """The name of the GPU, or of the processor with what it has for the C++ kernels and its number of torch threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _value_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    flags = cpu_flags()
    best = next((kind for flag, kind in VECTORS.items() if flag in flags), "")
    asked = os.environ.get("EAGLET_ISA")  # what the C++ kernels are compiled for (`support.native`)
    kinds = ", ".join(filter(None, (best, asked and f"kernels for {asked}")))
    return f"{name}{f' ({kinds})' if kinds else ''}, {torch.get_num_threads()} threads"


def cpu_flags() -> set[str]:
    """What the processor can do, as Linux lists it. Empty elsewhere."""
    return set(_value_of("/proc/cpuinfo", "flags").split())


def versions() -> dict[str, str]:
    """Versions that results are reported with."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device. On a CPU the page cache counts as free, and where the system does
    not tell (macOS), so does all of the memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _bytes_of("/proc/meminfo", "MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available


def peak_memory(device: torch.device) -> int | None:
    """Highest number of bytes allocated on the GPU, or resident in this process. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage would also count what the program that started this one held.
    return _bytes_of("/proc/self/status", "VmHWM")


def resident_memory() -> int | None:
    """Bytes of this process that are in memory now. None where the system does not tell."""
    return _bytes_of("/proc/self/status", "VmRSS")


def _bytes_of(file: str, name: str) -> int | None:
    """A number of bytes that a file of Linux tells. None where it does not."""
    value = _value_of(file, name)
    return int(value.split()[0]) * 1024 if value else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was launched. Nothing happens on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of copying: the best of five copies."""
    source = _source(device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device) for _ in range(5))


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading so many bytes, which is what decoding does: the best of 20 sums.

    Fewer are too short on a machine with other programs: 14 GB/s were told where 60 are the rule.
    """
    source = _source(device)
    return source.nbytes / min(seconds(source.sum, device) for _ in range(20))


def _source(device: torch.device) -> Tensor:
    """1 GiB on a GPU and 64 MiB on a CPU, far more than the caches there hold."""
    return torch.zeros(1 << (28 if device.type == "cuda" else 24), device=device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a call takes until the device has finished. On a CPU it is by the host's clock."""
    if device.type == "cuda":  # the host's clock would add the time of the launch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _value_of(file: str, name: str) -> str:
    """What a file of Linux says first of a name: `name : value`. "" where it does not."""
    pairs = (line.partition(":") for line in _lines_of(file))
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _lines_of(file: str) -> list[str]:
    path = Path(file)
    return path.read_text().splitlines() if path.exists() else []


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
INITIALISERS = frozenset(value for value in vars(torch.nn.init).values() if callable(value))


class _NoInitialisation(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in INITIALISERS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are made inside are on the meta device: they have shapes and take no memory.

    Nothing initialises their weights. On the meta device that would have no effect but to import torch's compiler, which
    takes a second and 40 MB.
    """
    with torch.device("meta"), _NoInitialisation():
        yield


def give_memory(module: nn.Module, device: torch.device | str) -> None:
    """Move a module without memory (`shapes_only`) to a device, with any values.

    As `module.to_empty`, whose copies of a tensor's strides import sympy, for a quarter of a second.
    """
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, but on a CPU the system supplies a page of it only when something is written there.

    A KV cache is as long as the context, and most requests use little of it. Huge pages would be 2 MB each, which is a
    head's keys of thousands of tokens.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


@contextlib.contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Inside, the memory of freed tensors goes back to the system at once, where the C library is glibc.

    By itself glibc keeps freed blocks up to 32 MB for later. While a model is read and packed, these are copies of its
    weights, which nobody needs later.
    """
    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if libc is None:
        yield
        return
    for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        # glibc starts with 128 KB and raises it after the first large block. With so little, rounding would spend most of
        # its time on fresh pages for small tensors.
        libc.mallopt(name, 4 << 20)
    try:
        yield
    finally:
        libc.malloc_trim(0)
        # As high as glibc itself would go: a step frees and takes the same blocks again and again.
        libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
