"""The names of devices in a placement."""

import re

from draftgraph.engine.errors import UsageError

DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]{0,2}))?")


def whole_name(device: str) -> str:
    """A device by the one name that everything here knows it by: cpu or cuda:N.

    Raises:
        UsageError: it is neither of them, nor `cuda`, the first.
    """
    if not DEVICE.fullmatch(device):
        raise UsageError(f"profile: placement names the device {device!r}; write cpu or cuda:N")
    return "cuda:0" if device == "cuda" else device
