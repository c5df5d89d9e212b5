"""Runs the interpreted tests of steps, blocks, types of files and the first look."""

from interpreting import run_interpreted
from tiny import needs_triton


@needs_triton
def test_interpreter_steps():
    """Catches what the interpreted tests catch, and one of them that is skipped here, too."""
    run_interpreted("test_launches.py", "test_block_draft.py", "test_panels.py", "test_first_look.py")
