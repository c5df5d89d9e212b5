"""Kernels that are launched before the kernel before them has ended: programmatic dependent launch, `--overlap`."""

from __future__ import annotations

import torch

from kernels.backend import INTERPRETED, active_backend, jit, tl


@jit
def wait_for_the_kernel_before(OVERLAP: tl.constexpr):
    """The first statement of a kernel whose programs may be placed while the kernel before it still runs (programmatic
    dependent launch, sm_90 and later).

    It lets the next kernel do the same, and then waits until the kernel before has ended and its memory can be seen. That
    kernel waited in its turn, so all that was launched earlier has ended, too. `tests/kernel_gate.py` checks in the
    machine code that no memory is accessed before the wait.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def can_overlap(device: torch.device) -> bool:
    """Whether kernels can be launched early on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping() -> dict[str, bool]:
    """The constant and the compiler option of a launch that may begin before the kernel before it has ended."""
    backend = active_backend()
    overlap = backend is not None and backend.overlap and not INTERPRETED
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
