"""What a lane captures: one callable over static buffers, and what must be known about it.

Promises nothing by itself. It does not allocate: every tensor named here is persistent and made by the caller.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One step of one bucket: what becomes one CUDA graph, or one eager call over the same buffers.

    Args:
        step: "target", "drafter" or "optimizer".
        bucket: name of the bucket, "" where the step does not depend on one.
        run: issues the work. Static tensors in, static tensors out, no return value, no wait for the device.
        inputs: static tensors read by `run`; their shape, dtype, device and address are checked before each replay.
        outputs: persistent tensors written by `run`; verification compares all of them bit for bit.
        fill: writes the inputs of verification round n and resets all state that `run` adds to. The same n gives
            the same bits, whatever ran before.
        predicted_bytes: size of the activations; the largest step of a lane is captured first.
        baked: what `run` reads on the host, which a graph fixes at capture; compared before each replay. Cheap.
    Owns: nothing. NOTE: all these tensors live outside the graph pool, at addresses that never change.
    """

    step: str
    bucket: str
    run: Callable[[], None]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    fill: Callable[[int], None]
    predicted_bytes: int
    baked: Callable[[], Hashable] = lambda: None

    @property
    def title(self) -> str:
        """The step as messages name it."""
        return f"step '{self.step}' of bucket '{self.bucket}'" if self.bucket else f"step '{self.step}'"
