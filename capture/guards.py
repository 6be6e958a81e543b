"""Checks a step's static inputs before each replay: a graph reads addresses, not tensors.

Promises that a re-allocated, re-shaped or re-typed input is refused before the device reads stale memory.
It does not look at values, and costs about a microsecond per tensor (warm-up measures it: `guard_us`).
"""

from torch import Tensor

from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.step import Step

_FIELDS = ("shape", "strides", "dtype", "device", "address")


def signature(tensor: Tensor) -> tuple[object, ...]:
    """What a graph took for granted about a tensor, in the order of `_FIELDS`."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr()


class InputGuard:
    """The signatures of a step's inputs at capture, compared with those at each replay."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._captured = [(name, signature(tensor)) for name, tensor in step.inputs.items()]
        self._baked = step.baked()

    def check(self) -> None:
        """Raise CaptureFailure naming the first input, or value of the host, that is no longer what was captured."""
        if (baked := self._step.baked()) != self._baked:
            raise CaptureFailure(
                f"{self._step.title} was captured with {self._baked} and would now run with {baked}: a graph does not "
                "see such a change. Install taps and hooks before warm-up, and leave them alone afterwards."
            )
        inputs = self._step.inputs
        for name, captured in self._captured:
            found = signature(inputs[name])
            if found != captured:
                self._refuse(name, captured, found)

    def _refuse(self, name: str, captured: tuple[object, ...], found: tuple[object, ...]) -> None:
        changes = "; ".join(
            f"{field}: captured {_show(field, before)}, found {_show(field, now)}"
            for field, before, now in zip(_FIELDS, captured, found, strict=True)
            if before != now
        )
        raise CaptureFailure(
            f"input '{name}' of {self._step.title} is not the tensor that was captured ({changes}). "
            "Write new values into the static tensor (copy_) instead of replacing it."
        )


def _show(field: str, value: object) -> str:
    if field == "address":
        return f"{value:#x}"
    return str(tuple(value) if isinstance(value, tuple) else value)
