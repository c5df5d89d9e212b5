"""A faster start: Python's search for cyclic garbage finds nothing while modules are imported and a model is read."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector(freeze: bool = False) -> Iterator[None]:
    """Inside, nothing is searched for cycles. That takes a tenth of torch's import, which makes a million objects.

    freeze: nor are the objects that were made inside searched later, as they stay until the process ends.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if searches:
            gc.enable()
