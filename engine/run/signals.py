"""What a running training hears: SIGINT and SIGTERM end it after the step, SIGUSR1 asks for a checkpoint."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STOP = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = b"ended at once; go on from the newest checkpoint with --resume\n"


@dataclass
class Requests:
    """Read between two steps; a handler only sets it."""

    stop: bool = False
    checkpoint: bool = False

    def __bool__(self) -> bool:
        return self.stop or self.checkpoint


@contextmanager
def listen() -> Iterator[Requests]:
    """Collect requests while the steps run. A second SIGINT or SIGTERM ends the process at once, with status 130."""
    requests = Requests()

    def receive(number: int, _: object) -> None:
        if number == signal.SIGUSR1:
            requests.checkpoint = True
        elif requests.stop:
            # No cleaning up, which may be what hangs; the data process ends by itself. The bar had hidden the cursor.
            os.write(2, (b"\x1b[?25h\n" if sys.stderr.isatty() else b"") + AT_ONCE)
            os._exit(130)
        else:
            requests.stop = True

    previous = {number: signal.signal(number, receive) for number in (*STOP, signal.SIGUSR1)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def usr1_ignored() -> Iterator[None]:
    """While a run warms up there is nothing to write yet, and nothing to die of."""
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
