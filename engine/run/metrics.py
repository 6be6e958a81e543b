"""Sums that a step adds up on the device, and the figures that a user reads from them, late and without a sync."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from draftgraph.engine.errors import RunError
from draftgraph.engine.models.loss import LossSums
from draftgraph.engine.run.disk import write_text
from draftgraph.engine.run.streams import Event, on

# Layout of a sums vector [M]: these, then K-1 correct, then K-1 counted.
LOSS, WEIGHT, ACCEPTED, BLOCKS = range(4)
HEAD = 4


def sums_size(block_size: int) -> int:
    return HEAD + 2 * (block_size - 1)


def as_vector(sums: LossSums) -> Tensor:
    """[M] float32 of one micro-step, made inside the captured graph."""
    head = torch.stack([sums.loss.detach(), sums.weight, sums.accepted, sums.blocks])
    return torch.cat([head, sums.correct_per_slot, sums.counted_per_slot])


@dataclass(frozen=True)
class StepFigures:
    """One step as it is logged; None where nothing was counted."""

    step: int
    loss: float | None
    accuracy: float | None
    accuracy_per_slot: list[float | None]
    acceptance: float | None  # simulated; the bonus token counts as 1
    grad_norm: float | None
    lr: float
    skipped: int  # updates left out so far because a number was not finite or nothing was counted


@dataclass(frozen=True)
class RealAcceptance:
    """Acceptance as decoding held-out prompts measures it; None where no forward was needed."""

    acceptance: float | None
    acceptance_per_slot: list[float | None]

    @classmethod
    def of(cls, counts: Sequence[float]) -> Self:
        """Counts: verify forwards, then those of them that accepted the draft of slot 1, 2, ..."""
        forwards, *accepted = counts
        return cls(
            1 + sum(accepted) / forwards if forwards else None,
            [count / forwards if forwards else None for count in accepted],
        )


def ratio(over: float, under: float) -> float | None:
    """None where nothing was counted or the sum is not finite: NaN is no JSON."""
    return over / under if under > 0 and math.isfinite(over) else None


def figures(step: int, vector: list[float], block_size: int) -> StepFigures:
    """Figures of one step from [sums [M], grad norm, rate, skipped]."""
    slots = block_size - 1
    correct, counted = vector[HEAD : HEAD + slots], vector[HEAD + slots : HEAD + 2 * slots]
    grad_norm, lr, skipped = vector[HEAD + 2 * slots :]
    return StepFigures(
        step=step,
        loss=ratio(vector[LOSS], vector[WEIGHT]),
        accuracy=ratio(sum(correct), sum(counted)),
        accuracy_per_slot=[ratio(c, n) for c, n in zip(correct, counted, strict=True)],
        acceptance=ratio(vector[ACCEPTED], vector[BLOCKS]),
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        lr=lr,
        skipped=int(skipped),
    )


class LateFigures:
    """Brings each step's published vector to the host without a wait.

    Owns: a pinned ring of `depth` vectors; a vector is rewritten only after it was read.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 8):
        self.ring = torch.zeros(depth, size, pin_memory=device.type == "cuda")
        self.arrived = [Event(device) for _ in range(depth)]
        self.pending: list[int] = []  # steps, oldest first

    def publish(self, step: int, published: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Send the vector of `step`; at most `depth` may be unread."""
        assert len(self.pending) < len(self.arrived), "read the figures of finished steps before publishing more"
        slot = step % len(self.arrived)
        with on(stream):
            self.ring[slot].copy_(published, non_blocking=True)
        self.arrived[slot].record(stream)
        self.pending.append(step)

    def finished(self, wait: bool = False) -> list[tuple[int, list[float]]]:
        """Vectors that have arrived, in step order. The host waits only for `wait`, or where the ring is full."""
        done = []
        while self.pending:
            step = self.pending[0]
            event = self.arrived[step % len(self.arrived)]
            if wait or len(self.pending) == len(self.arrived):
                event.wait()
            elif not event.happened():
                break
            done.append((step, self.ring[step % len(self.arrived)].tolist()))
            del self.pending[0]
        return done


class Tally:
    """A run's figures: every step appended to metrics.jsonl; the first and last steps kept.

    Args:
        first_step: on a resume, lines of later steps are dropped, since they will be written again.
    """

    WINDOW: ClassVar[int] = 10  # steps averaged for a summary

    def __init__(self, block_size: int, path: Path, first_step: int):
        self.block_size = block_size
        kept = path.read_text(errors="replace").splitlines() if path.is_file() else []
        write_text(path, "".join(line + "\n" for line in kept if 0 < step_of(line) <= first_step))
        self.path = path
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.first: list[StepFigures] = []
        self.last: deque[StepFigures] = deque(maxlen=self.WINDOW)
        self.skipped = 0
        self.issued: dict[int, int] = {}  # steps whose figures have not arrived -> their real tokens
        self.extra: dict[str, object] = {}  # what else the next line tells
        self.real: dict[int, RealAcceptance] = {}  # step -> as measured by decoding
        self.best_step = 0  # of the best of them, also of those that the log held; 0: none
        self.best = 0.0
        for step, acceptance in real_acceptances(path).items():
            self.judge(step, acceptance)

    def judge(self, step: int, acceptance: float) -> bool:
        """Is this the best real acceptance so far."""
        if acceptance <= self.best:
            return False
        self.best, self.best_step = acceptance, step
        return True

    def measured(self, step: int, found: RealAcceptance) -> bool:
        """Take in an evaluation of the weights of `step`, before its figures; was it the best so far."""
        self.real[step] = found
        return found.acceptance is not None and self.judge(step, found.acceptance)

    def add(self, vectors: list[tuple[int, list[float]]]) -> list[StepFigures]:
        """Log the vectors of steps, and return their figures.

        Raises:
            RunError: the disk refused.
        """
        rows = [figures(step, vector, self.block_size) for step, vector in vectors]
        for row in rows:
            try:
                rest: dict[str, Any] = {"real_tokens": self.issued.pop(row.step, None), "time": round(time.time(), 3)}
                if row.step in self.real:
                    rest |= {f"real_{name}": value for name, value in asdict(self.real[row.step]).items()}
                self.file.write(json.dumps({**asdict(row), **self.extra, **rest}) + "\n")
                self.extra = {}
            except OSError as error:
                raise RunError(
                    f"cannot write {self.path}: {error.strerror}. The last good checkpoint is untouched; free some "
                    "space, then go on with --resume"
                ) from error
            if len(self.first) < self.WINDOW:
                self.first.append(row)
            self.last.append(row)
            self.skipped = row.skipped
        return rows

    def headline(self, real_tokens_per_s: float) -> str:
        """Two lines for the progress bar."""
        last = self.first_and_last()
        if last["loss_last"] is None:
            return "train"
        real = self.real_figures()["real_acceptance"]
        return (
            f"loss {last['loss_last']:.3f}, {real_tokens_per_s:,.0f} real tokens/s\n"
            f"simulated acceptance {last['acceptance_after']:.3f} (bonus counted)"
            + ("" if real is None else f", real {real:.3f} at step {max(self.real)}")
        )

    def real_figures(self) -> dict[str, float | None]:
        """The real acceptance of this process's first and last evaluation, and the best of the run."""
        steps = sorted(self.real)
        return {
            "real_acceptance_first": self.real[steps[0]].acceptance if steps else None,
            "real_acceptance": self.real[steps[-1]].acceptance if steps else None,
            "real_acceptance_best": self.best or None,
            "real_acceptance_best_step": self.best_step or None,
        }

    def first_and_last(self) -> dict[str, float | None]:
        """Loss and simulated acceptance, averaged over the first and the last steps of this process's run."""
        return {
            "loss_first": mean(row.loss for row in self.first),
            "loss_last": mean(row.loss for row in self.last),
            "acceptance_before": mean(row.acceptance for row in self.first),
            "acceptance_after": mean(row.acceptance for row in self.last),
        }

    def close(self) -> None:
        # What could not be written was told.
        with contextlib.suppress(OSError):
            self.file.close()


def step_of(line: str) -> int:
    """The step of a line of metrics.jsonl; 0 for one that an interruption tore."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def real_acceptances(log: Path) -> dict[int, float]:
    """What a run's evaluations measured: step -> real acceptance."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    found = {step: json.loads(line).get("real_acceptance") for line in lines if (step := step_of(line))}
    return {step: acceptance for step, acceptance in found.items() if acceptance is not None}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what was counted."""
    counted = [value for value in values if value is not None]
    return sum(counted) / len(counted) if counted else None
