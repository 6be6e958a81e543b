"""How a figure is taken: warm-up, CUDA events, medians, variants rotated in one process, the ceiling of the same run.

Promises: inputs come from the caller and are random, preparation is outside the timed part, and nothing waits inside a
timed part. On the CPU the same code runs on host clocks, to be tested: such figures are no measurements, and whatever
is a share of a ceiling is null there.
"""

import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftgraph.capture.ceiling import matmul_ceiling
from draftgraph.engine.config import Profile

ROUNDS = 10


@dataclass(frozen=True)
class Result:
    """One workload, measured. `figures` is what its goals read (None: not measured), the texts are for the table."""

    profile: Mapping[str, object] | str
    ours: dict[str, Any]
    peer: dict[str, Any] | None
    ratio: float | None
    ours_text: str
    peer_text: str
    share_text: str
    figures: dict[str, float | None] = field(default_factory=dict)


class Bench:
    """What every workload is handed: the device, the ceiling measured on it in this run, and a place to speak.

    Args:
        assignments: section.key=value, over the profiles of the workloads.
        known_peers: workload -> what its peer reached earlier on this machine, by rows; it is not measured again.
    Owns: nothing on the device once it is made.
    """

    def __init__(
        self,
        console: Console,
        quick: bool,
        assignments: Sequence[str] = (),
        known_peers: Mapping[str, dict[int, dict[str, Any]]] | None = None,
    ):
        self.console, self.quick, self.assignments = console, quick, assignments
        self.known_peers = known_peers or {}
        self.started = time.perf_counter()
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.say(f"bf16 matmul ceiling on {self.device}")
        self.ceilings = ceilings(self.device)
        self.free()

    @property
    def ceiling_tflops(self) -> float | None:
        """At once: on a cool device, which no training leaves it."""
        return self.ceilings["ceiling_tflops"]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def say(self, line: str) -> None:
        """One line per phase, with the seconds since the command began."""
        elapsed = time.perf_counter() - self.started
        self.console.print(f"[{elapsed:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    def free(self) -> None:
        """Give the device's memory back, for another workload or a peer in its own process."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    @functools.cached_property
    def fp8_ceiling_tflops(self) -> float | None:
        """The ceiling of products in FP8 with a scale per row, measured when it is first asked for."""
        if not self.on_gpu:
            return None
        self.say(f"FP8 matmul ceiling on {self.device}")
        found = matmul_ceiling(self.device, torch.float8_e4m3fn, rounds=30)
        self.free()
        return found

    def target_ceiling(self, profile: Profile) -> float | None:
        """Of the type in which the target's products run."""
        return self.fp8_ceiling_tflops if profile.target.precision == "fp8" else self.ceiling_tflops

    def share_of_ceiling(self, flops: float, ms: float) -> float | None:
        return flops / ms / 1e9 / self.ceiling_tflops if self.ceiling_tflops else None


class Clock:
    """Marks points in the work of one stream; the seconds between them are read at the end, without a wait before.

    Args:
        count: marks, at most. Their events are made and recorded here, so that a mark allocates nothing.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None, count: int):
        self.stream = stream
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(count)] if device.type == "cuda" else None
        for event in self.events or ():
            event.record(stream)
        self.host: list[float] = []

    def mark(self) -> None:
        if self.events is not None:
            self.events[len(self.host)].record(self.stream)
        self.host.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between one mark and the next; the last one must have happened."""
        if self.events is None:
            return [b - a for a, b in itertools.pairwise(self.host)]
        used = self.events[: len(self.host)]
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(used)]


def measure(
    device: torch.device,
    variants: Mapping[str, Callable[[], object]],
    prepare: Callable[[], None] = lambda: None,
    rounds: int = ROUNDS,
    warmup: int = 3,
) -> dict[str, float]:
    """Median milliseconds of every variant; each round starts with another one.

    Args:
        prepare: runs before every timed call, untimed, on the current stream.
    """
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            clock = Clock(device, None, 2)
            prepare()
            clock.mark()
            variants[name]()
            clock.mark()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 0:
                found[name].append(clock.seconds()[0] * 1e3)
    return {name: median(times) for name, times in found.items()}


def ceilings(device: torch.device) -> dict[str, float | None]:
    """TFLOP/s of a bf16 product of 8192 cubed, at once and after three seconds of them, and the SM clock then."""
    names = ("ceiling_tflops", "sustained_tflops", "sustained_sm_mhz")
    if device.type != "cuda":
        return dict.fromkeys(names)
    at_once = matmul_ceiling(device, torch.bfloat16, rounds=30)
    sustained = matmul_ceiling(device, torch.bfloat16, rounds=30, seconds=3.0)
    a = random_like(device, (8192, 8192), 0)
    for _ in range(50):
        torch.mm(a, a)
    mhz = torch.cuda.clock_rate(device)  # while the products above are running
    torch.cuda.synchronize(device)
    return dict(zip(names, (at_once, sustained, mhz), strict=True))


def random_like(device: torch.device, shape: tuple[int, ...], seed: int, std: float = 1.0) -> Tensor:
    """Normal noise in the dtype that the device trains in."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """max|difference| / max|truth|; infinite where ours is not finite, so that no maximum hides it."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max())
