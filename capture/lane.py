"""A lane: the graphs of one target or one drafter on one device.

The graphs of a lane never replay at the same time, so they share one pool and one stream, and later graphs reuse the
memory of earlier ones. Two roles that overlap on one GPU are two lanes: in one pool they would overwrite each other.

Life cycle: `add` every step, `warm_up`, `capture` (seals the table), `replay` until `close`, all from one thread.
In the eager mode the same calls run the same callables over the same buffers, without graphs.
A lane does not order itself against other streams: whoever copies into its inputs waits on events.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch

from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.evidence import GraphEvidence
from draftgraph.capture.families import families, implementations
from draftgraph.capture.graph import CapturedGraph, out_of_memory, quiet_garbage_collector
from draftgraph.capture.guards import InputGuard
from draftgraph.capture.products import CountProducts
from draftgraph.capture.step import Step

Mode = Literal["graph", "eager"]

_LAUNCHES = ("kernel", "memcpy", "memset")
_GUARD_CHECKS = 100


@dataclass
class _Entry:
    step: Step
    guard: InputGuard | None = None
    graph: CapturedGraph | None = None
    eager_ms: list[float] = field(default_factory=list)
    replay_ms: list[float] = field(default_factory=list)
    products: CountProducts | None = None
    guard_us: float | None = None
    max_difference: float | None = None


class Lane:
    """The steps of one target or one drafter on one device, captured or eager.

    Args:
        name: unique among the lanes of a run, such as "target 0".
        device: with its index where it is a GPU.
        mode: "graph" needs a CUDA device; "eager" runs anywhere and is chosen, never fallen into.
    Stream: all work goes to `stream` (None on CPU); warm-up and capture use the same one.
    Owns: the graphs, their pool and the stream. Every tensor of a step belongs to the caller.
    """

    def __init__(self, name: str, device: torch.device, mode: Mode) -> None:
        assert mode in ("graph", "eager"), mode
        assert device.type == "cuda" or mode == "eager", f"lane '{name}': no graphs on {device}"
        assert device.type != "cuda" or device.index is not None, f"lane '{name}': {device} has no index"
        self.name = name
        self.device = device
        self.mode: Mode = mode
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._warm = False
        self._sealed = False
        self._owner = threading.get_ident()

    @property
    def steps(self) -> list[Step]:
        """The steps in the order of capture: largest first, so that smaller graphs fit into its blocks."""
        return sorted((entry.step for entry in self._entries.values()), key=lambda step: -step.predicted_bytes)

    @property
    def evidence(self) -> list[GraphEvidence]:
        """One row per step, in the order of capture."""
        return [self._row(self._entry(step)) for step in self.steps]

    def on_stream(self) -> AbstractContextManager[object]:
        """The lane's device and stream as the current ones; nothing on CPU."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        """Wait for all work of the device. For set-up only: a running schedule waits on events."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def add(self, step: Step) -> None:
        """Enter a step into the table; refused once the table is sealed."""
        self._refuse_if_sealed("add", step.title)
        key = (step.step, step.bucket)
        assert key not in self._entries, f"lane '{self.name}' already has {step.title}"
        self._entries[key] = _Entry(step)

    def warm_up(self, rounds: int = 3) -> None:
        """Run every step eagerly on the lane's stream, largest first: kernels compile, handles and workspaces appear.

        Raises:
            CaptureFailure: a step does not fit into the device's memory.
        """
        self._refuse_if_sealed("warm up", "steps")
        self.synchronize()
        for step in self.steps:
            for number in range(rounds):
                self.fill(step, number)
                if number == 0 and self.stream is not None:
                    with CountProducts() as counted:
                        self.run_eager(step)
                    self._entry(step).products = counted
                else:
                    self.run_eager(step)
            # The first run pays for compilation; it says nothing about the step.
            del self._entry(step).eager_ms[0]
        self._warm = True

    def capture(self) -> None:
        """Capture every step, largest first, into one pool; then the table is sealed.

        Raises:
            CaptureFailure: a step cannot be captured. The program has to end: nothing falls back to eager.
        """
        self._refuse_if_sealed("capture", "steps")
        assert self._warm, f"lane '{self.name}' must be warmed up before it captures"
        if self.stream is not None and self.mode == "graph":
            pool = torch.cuda.graph_pool_handle()
            with self.on_stream(), quiet_garbage_collector():
                for step in self.steps:
                    self._entry(step).graph = CapturedGraph(step, pool, self.stream)
        for entry in self._entries.values():
            guard = entry.guard = InputGuard(entry.step)
            started = time.perf_counter()
            for _ in range(_GUARD_CHECKS):
                guard.check()
            entry.guard_us = (time.perf_counter() - started) / _GUARD_CHECKS * 1e6
        self._sealed = True

    def replay(self, step: str, bucket: str = "") -> None:
        """Issue one step on the lane's stream and return; in the graph mode it neither allocates nor waits.

        Raises:
            CaptureFailure: no such step and bucket, or an input is no longer the tensor that was captured.
        """
        assert threading.get_ident() == self._owner, f"lane '{self.name}' belongs to the thread that made it"
        entry = self._entries.get((step, bucket))
        if entry is None:
            raise CaptureFailure(
                f"lane '{self.name}' has no step '{step}' of bucket '{bucket}'; it holds "
                f"{', '.join(known.title for known in self.steps) or 'none'}. Every shape that a run uses is added "
                "before warm-up; a running program never captures again."
            )
        assert entry.guard is not None, f"lane '{self.name}' replays before it is captured"
        entry.guard.check()
        with self.on_stream():
            if entry.graph is None:
                entry.step.run()
            else:
                entry.graph.replay()

    def close(self) -> None:
        """Wait for the last replay and destroy the graphs. NOTE: before any communicator is destroyed."""
        self.synchronize()
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.close()
        self._entries.clear()
        self._sealed = True

    # Set-up and verification only: these wait for the device.

    def fill(self, step: Step, number: int) -> None:
        """Write the inputs of verification round `number` on the lane's stream."""
        with self.on_stream():
            step.fill(number)

    def run_eager(self, step: Step) -> None:
        """Run the step's callable once, timed."""
        try:
            self._entry(step).eager_ms.append(self._timed(step))
        except torch.OutOfMemoryError as error:
            raise out_of_memory(step, self.device, "the eager run of", error) from error

    def replay_timed(self, step: Step) -> None:
        """Replay once; timed where there is a graph."""
        entry = self._entry(step)
        elapsed_ms = self._timed(step, replay=True)
        if entry.graph is not None:
            entry.replay_ms.append(elapsed_ms)

    def timings(self, step: Step) -> tuple[list[float], list[float]]:
        """Milliseconds of the eager runs of the step so far, less the first, and of its replays."""
        entry = self._entry(step)
        return entry.eager_ms, entry.replay_ms

    def record_difference(self, step: Step, max_difference: float) -> None:
        """Enter the result of verification."""
        self._entry(step).max_difference = max_difference

    def _timed(self, step: Step, replay: bool = False) -> float:
        def issue() -> None:
            if replay:
                self.replay(step.step, step.bucket)
            else:
                with self.on_stream():
                    step.run()

        if self.stream is None:
            started = time.perf_counter()
            issue()
            return (time.perf_counter() - started) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        issue()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end)

    def _entry(self, step: Step) -> _Entry:
        return self._entries[step.step, step.bucket]

    def _refuse_if_sealed(self, action: str, what: str) -> None:
        if self._sealed:
            raise CaptureFailure(
                f"lane '{self.name}' is sealed: it cannot {action} {what} after capture. "
                "Add every step before warm-up; a running program never captures again."
            )

    def _row(self, entry: _Entry) -> GraphEvidence:
        graph = entry.graph
        census = None if graph is None else graph.census
        return GraphEvidence(
            lane=self.name,
            device=str(self.device),
            step=entry.step.step,
            bucket=entry.step.bucket,
            nodes=None if census is None else census.nodes,
            node_types=None if census is None else census.node_types,
            kernels=None if census is None else census.kernels,
            families=None if census is None else families(census.kernels),
            implementations=None if census is None else implementations(census.kernels),
            eager_launches=None if census is None else sum(census.node_types.get(kind, 0) for kind in _LAUNCHES),
            replay_launches=None if graph is None else 1,
            pool_bytes=None if graph is None else graph.pool_bytes,
            executable_bytes=None if graph is None else graph.executable_bytes,
            capture_seconds=None if graph is None else graph.seconds,
            eager_ms=median(entry.eager_ms) if entry.eager_ms else None,
            replay_ms=median(entry.replay_ms) if entry.replay_ms else None,
            gemm_flops=None if entry.products is None else entry.products.flops,
            gemm_fp8_flops=None if entry.products is None else entry.products.fp8_flops,
            guard_us=entry.guard_us,
            max_difference=entry.max_difference,
        )
