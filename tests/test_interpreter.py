"""Runs the interpreted tests of the kernels, and of recurrent layers."""

from interpreting import run_interpreted
from tiny import needs_triton


@needs_triton
def test_triton_interpreter():
    """Catches what the interpreted tests catch, and one of them that is skipped here, too."""
    run_interpreted("test_kernels.py", "test_delta.py")
