"""NVTX ranges: what the host is busy with, for which role, bucket and device.

A name has always four fields, so that a trace can be queried: `ROLE | PHASE | BUCKET | DEVICE`, "-" where one does not
apply. ROLE is "target N", "drafter N", "scheduler", "data" or "eval"; PHASE is one of PHASES; BUCKET is the name of a
bucket, such as "r4-s512-a128"; DEVICE is "cuda:N" or "cpu". The colour tells the role.

Promises to cost about a microsecond where no tool listens. It measures nothing by itself, and device time is
attributed to a range only through the launches inside it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import NamedTuple, Protocol

import nvtx

# In the order of a step; "step" holds all others but "collate", which is the data process's.
PHASES = (
    "step",
    "wait",
    "collate",
    "h2d",
    "target replay",
    "hand-off",
    "drafter replay",
    "reduce",
    "optimizer",
    "metrics",
    "evaluation",
)
COLORS = {
    "target": 0xFF4C72B0,
    "drafter": 0xFFDD8452,
    "scheduler": 0xFF8C8C8C,
    "data": 0xFF55A868,
    "eval": 0xFF8172B3,
}  # ARGB

_NAME = re.compile(
    rf"((?:target|drafter) \d+|scheduler|data|eval) \| ({'|'.join(PHASES)}) \| (-|r\d+-s\d+-a\d+) \| (-|cuda:\d+|cpu)"
)


class RangeName(NamedTuple):
    """The four fields of a name; empty where one does not apply."""

    role: str
    phase: str
    bucket: str = ""
    device: str = ""

    def __str__(self) -> str:
        return " | ".join(field or "-" for field in self)


def parse(name: str) -> RangeName | None:
    """The fields of a range's name; None for a name of somebody else's."""
    match = _NAME.fullmatch(name)
    return RangeName(*("" if field == "-" else field for field in match.groups())) if match else None


class Mirror(Protocol):
    """Receives every range too, where a profiler does not listen to NVTX."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


_mirror: Mirror | None = None


@contextmanager
def mirrored(mirror: Mirror) -> Iterator[None]:
    """Ranges that open inside the block go to `mirror` as well."""
    global _mirror
    assert _mirror is None
    _mirror = mirror
    try:
        yield
    finally:
        _mirror = None


class Range:
    """One named range; the same object may be entered again and nested in itself.

    Owns: the registered name, so that a tool receives a handle instead of a string.
    """

    __slots__ = ("_attributes", "_domain", "name")

    def __init__(self, name: RangeName) -> None:
        self.name = str(name)
        self._domain = nvtx.get_domain("draftgraph")
        self._attributes = self._domain.get_event_attributes(message=self.name, color=COLORS[name.role.split()[0]])

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)
        if _mirror is not None:
            _mirror.push(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _mirror is not None:
            _mirror.pop()
        self._domain.pop_range()


@cache
def nvtx_range(role: str, phase: str, bucket: str = "", device: str = "") -> Range:
    """The range "drafter 0 | drafter replay | r4-s512-a128 | cuda:0", made once per set of fields."""
    name = RangeName(role, phase, bucket, device)
    assert parse(str(name)) == name, f"{str(name)!r} is outside the grammar"
    return Range(name)
