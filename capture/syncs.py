"""Counts the calls by which the calling thread waits for the device, while a region runs.

It uses torch's sync debug mode, which warns at every wait that torch issues itself: `.item()`, `.tolist()`, `.cpu()`,
nonzero, boolean indexing, copies from or to unpinned memory, `Stream.synchronize`. It does not see
`torch.cuda.synchronize`, `Event.synchronize` (the look-ahead wait, which the scheduler counts), or waits inside other
libraries: an nsys trace does. Costs nothing where no wait happens.
"""

import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import torch

from draftgraph.capture.stacks import innermost

_MESSAGE = "called a synchronizing CUDA operation"


class SyncCount:
    """How many waits were seen, None where there is no CUDA device to wait for, and where the first one was."""

    def __init__(self, value: int | None) -> None:
        self.value = value
        self.first = ""


@contextmanager
def count_syncs() -> Iterator[SyncCount]:
    """Count the waits of this thread inside the block; `value` grows while it runs.

    NOTE: the debug mode and Python's warning filters are process-wide; other warnings pass through unchanged.
    """
    if not torch.cuda.is_available():
        yield SyncCount(None)
        return
    owner = threading.get_ident()
    count = SyncCount(0)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def count_or_show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not str(message).startswith(_MESSAGE):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == owner:
                assert count.value is not None
                count.value += 1
                count.first = count.first or innermost(traceback.extract_stack(), limit=3)

        warnings.showwarning = count_or_show
        # Torch says once per process that the mode does not see every wait; so does this module.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_MESSAGE)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode(before)
