"""Runs the interpreted tests of the kernels."""

import pytest
from interpreting import run_interpreted

import kernels


@pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
def test_triton_interpreter():
    """Catches what the interpreted tests catch, and one of them that is skipped here, too."""
    run_interpreted("test_kernels.py")
