"""Runs the tests named `test_interpreted_*`, which need TRITON_INTERPRET=1 before Triton is imported, in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "tests/test_kernels.py",
    "tests/test_launches.py",
    "tests/test_block_draft.py",
    "tests/test_panels.py",
    "tests/test_first_look.py",
)


@pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
def test_triton_interpreter():
    """Catches what the interpreted tests catch, and one of them that is skipped here, too."""
    options = ["-q", "-x", "-rs", "-p", "no:cacheprovider", "-k", "test_interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout
