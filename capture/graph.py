"""Captures one step into one CUDA graph.

Promises an instantiated graph in the given pool, with its census, or one CaptureFailure that names the bucket, the
operation and what to change. It does not warm up, check inputs, or decide an order: the lane does.
"""

import gc
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from draftgraph.capture.census import Census, read_graph
from draftgraph.capture.errors import CaptureFailure, DeviceMemoryExhausted
from draftgraph.capture.stacks import innermost
from draftgraph.capture.step import Step


class CapturedGraph:
    """A step as a CUDA graph, ready to launch.

    Args:
        step: warmed up eagerly on `stream` before, so that nothing compiles, tunes or creates handles here.
        pool: the lane's `torch.cuda.graph_pool_handle()`; graphs of one pool never run at the same time.
        stream: the lane's stream, current device already set to its device.
    Raises:
        CaptureFailure: the step cannot be captured, or memory ran out. The process cannot go on: the allocator may
            still believe that a capture is under way.
    Stream: captures on `stream`; `replay` launches on the current stream.
    Owns: the graph, its executable, and its share of the pool until `close`.

    `executable_bytes` is what the driver took while the graph was instantiated, in its own large units, which small
    graphs may share; torch's counters do not see it.
    """

    num_captures: ClassVar[int] = 0  # of this process

    def __init__(self, step: Step, pool: Any, stream: torch.cuda.Stream) -> None:
        # Cached blocks go back first, so that the growth of the reserved memory is the pool's alone.
        torch.cuda.synchronize(stream.device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(stream.device)
        started = time.perf_counter()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        first_error: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    step.run()
                except Exception as error:
                    # Ending an invalidated capture raises an error of its own, which says nothing about the cause.
                    first_error = error
                    raise
            self.census: Census | None = read_graph(self._graph.raw_cuda_graph())
            free_bytes, _ = torch.cuda.mem_get_info(stream.device)
            self._graph.instantiate()
            self.executable_bytes = free_bytes - torch.cuda.mem_get_info(stream.device)[0]
        except Exception as error:
            raise _failure(step, stream.device, first_error or error) from error
        CapturedGraph.num_captures += 1
        self.seconds = time.perf_counter() - started
        self.pool_bytes = torch.cuda.memory_reserved(stream.device) - reserved

    def replay(self) -> None:
        """Launch the graph on the current stream; returns at once."""
        self._graph.replay()

    def close(self) -> None:
        """Destroy the graph. NOTE: its last replay must have finished."""
        self._graph.reset()


@contextmanager
def quiet_garbage_collector() -> Iterator[None]:
    """Collect now, then keep the collector away: a finaliser that frees CUDA objects would break a capture."""
    gc.collect()
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def out_of_memory(step: Step, device: torch.device, doing: str, error: torch.OutOfMemoryError) -> DeviceMemoryExhausted:
    """The failure that says which step did not fit, how much it asked for, and what else is there."""
    told = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        told = f". It holds {torch.cuda.memory_allocated(device) / 2**30:.2f} GiB of tensors; "
        told += f"{free / 2**30:.2f} of {total / 2**30:.1f} GiB are free"
    asked = re.match(r"CUDA out of memory. (Tried to allocate [^.]+\.?\d* \w+)", str(error))
    text = asked[1] if asked else _first_line(error)
    return DeviceMemoryExhausted(f"{doing} {step.title} ran out of memory on {device}: {text}{told}", device)


def _failure(step: Step, device: torch.device, error: Exception) -> CaptureFailure:
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(step, device, "capturing", error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith("autotuner.py") for frame in frames):
        advice = (
            "A kernel began to tune itself during the capture: it met a shape that the warm-up had not shown it. Warm "
            "up with the same tensors that are captured, or give the kernel one fixed configuration."
        )
    elif "captur" in str(error):
        advice = (
            "A captured step must not wait for the device or read a value back (.item(), .tolist(), nonzero, boolean "
            "indexing, copies from unpinned memory): keep the value in a tensor on the device."
        )
    else:
        advice = "Run the same profile in the eager mode to see whether the step fails by itself."
    return CaptureFailure(f"capturing {step.title} failed at {innermost(frames)}: {_first_line(error)}. {advice}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
