"""Names stretches of host time for nsys: which role, on which device, does which phase for which bucket.

Promises to cost about a microsecond where no tool listens. It measures nothing by itself, and device time is
attributed to a range only through the launches inside it.
"""

from functools import cache
from types import TracebackType

import nvtx


class Range:
    """One named range; the same object may be entered again and nested in itself.

    Owns: the registered name, so that a tool receives a handle instead of a string.
    """

    __slots__ = ("_attributes", "_domain")

    def __init__(self, name: str) -> None:
        self._domain = nvtx.get_domain("draftgraph")
        self._attributes = self._domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._domain.pop_range()


@cache
def nvtx_range(role: str, phase: str, bucket: str = "", device: str = "") -> Range:
    """The range "drafter 0 | replay | r4-s512-a128 | cuda:0", made once per set of names.

    Args:
        role: such as "target 0", "drafter 1", "scheduler".
        phase: such as "collate", "copy", "replay", "reduce", "optimizer".
        bucket, device: left out where empty.
    """
    return Range(" | ".join(part for part in (role, phase, bucket, device) if part))
