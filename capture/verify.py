"""Verifies that replaying gives the bits of the eager run, on changing inputs, with the buckets interleaved.

Two phases around the capture, so that eager activations never lie beside the pool: `eager_references` runs every round
eagerly and keeps only hashes; after `Lane.capture`, `compare` replays the rounds and compares hash by hash. On eager
lanes the same two phases find steps that depend on what ran before them.
It writes inputs and state through `Step.fill`: the caller restores its weights afterwards. It waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgraph.capture.bits import BitHasher, max_difference
from draftgraph.capture.errors import CaptureFailure
from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step

# A median of fewer timings says little, unless they are long; the verification rounds count among them.
_MIN_TIMINGS, _LONG_MS = 5, 500.0

Key = tuple[str, str, str, int]  # lane, step, bucket, round
Hashes = dict[str, list[int]]  # output -> hash


@dataclass(frozen=True)
class References:
    """The hashes of every output of every eager round."""

    rounds: int
    hashes: dict[Key, Hashes]


def eager_references(lanes: Sequence[Lane], rounds: int = 3) -> References:
    """Run every step eagerly on the inputs of each round and keep the hashes of its outputs; before capture.

    Args:
        lanes: warmed up, not yet captured.
        rounds: how many sets of inputs; `Step.fill` makes set n.
    """
    hashes: dict[Key, Hashes] = {}
    for lane in lanes:
        hashes |= _eager_rounds(lane, rounds)
    _release_cached_memory(lanes)
    return References(rounds, hashes)


def compare(lanes: Sequence[Lane], references: References) -> None:
    """Replay all rounds, round by round over all steps of all lanes, and compare every output bit for bit.

    The rounds run backwards, so every step follows on something else than it did in the eager run.

    Args:
        lanes: the same lanes, captured.
        references: of the same steps.
    Raises:
        CaptureFailure: an output differs; names it, with the largest difference of a second look at it.
    """
    _replay_rounds(lanes, references)
    for lane in lanes:
        for step in lane.steps:
            while lane.mode == "graph" and not _timed_well(lane.timings(step)[1]):
                lane.fill(step, 0)
                lane.replay_timed(step)
            lane.record_difference(step, 0.0)
    _release_cached_memory(lanes)


def _eager_rounds(lane: Lane, rounds: int) -> dict[Key, Hashes]:
    hasher = _hasher(lane)
    hashes: dict[Key, Hashes] = {}
    for step in lane.steps:
        for number in range(rounds):
            lane.fill(step, number)
            lane.run_eager(step)
            hashes[lane.name, step.step, step.bucket, number] = _hashes(lane, step, hasher)
        # Without a graph there is nothing to compare the time with, and eager steps on a CPU are long.
        while lane.mode == "graph" and not _timed_well(lane.timings(step)[0]):
            lane.fill(step, 0)
            lane.run_eager(step)
    return hashes


def _replay_rounds(lanes: Sequence[Lane], references: References) -> None:
    hashers = {lane.name: _hasher(lane) for lane in lanes}
    for number in reversed(range(references.rounds)):
        for lane in lanes:
            for step in lane.steps:
                lane.fill(step, number)
                lane.replay_timed(step)
                expected = references.hashes[lane.name, step.step, step.bucket, number]
                for name, found in _hashes(lane, step, hashers[lane.name]).items():
                    if found != expected[name]:
                        raise _mismatch(lane, step, number, name)


def _timed_well(times_ms: list[float]) -> bool:
    return len(times_ms) >= _MIN_TIMINGS or sum(times_ms) >= _LONG_MS


def _hasher(lane: Lane) -> BitHasher:
    # NOTE: on the stream that uses it, or the first hashes would race with its weights.
    with lane.on_stream():
        return BitHasher(lane.device)


def _hashes(lane: Lane, step: Step, hasher: BitHasher) -> Hashes:
    with lane.on_stream():
        digests = torch.stack([hasher.digest(tensor) for tensor in step.outputs.values()])
        return dict(zip(step.outputs, digests.tolist(), strict=True))


def _release_cached_memory(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.synchronize()
    if any(lane.stream is not None for lane in lanes):
        torch.cuda.empty_cache()


def _mismatch(lane: Lane, step: Step, number: int, name: str) -> CaptureFailure:
    """A second look at the differing round: is it the capture, the step's own order of sums, or stale state?"""
    eager, eager_again = _output(lane, step, number, name, eager=True), _output(lane, step, number, name, eager=True)
    replayed = _output(lane, step, number, name, eager=False)
    if eager_difference := max_difference(eager, eager_again):
        finding = (
            f"two eager runs of this round differ by up to {eager_difference:g}: a kernel in it is not deterministic, "
            "or the step reads state that its fill does not reset"
        )
    elif difference := max_difference(eager, replayed):
        finding = (
            f"the largest difference is {difference:g}: the captured work depends on a value or an address that was "
            "fixed at capture"
        )
    else:
        finding = (
            "run again by itself the round agrees: the step depends on what ran before it (state that its fill does "
            "not reset, padding that is not written, or memory shared with another step)"
        )
    return CaptureFailure(
        f"lane '{lane.name}': output '{name}' of {step.title} is not bit-equal to the eager run "
        f"in verification round {number}; {finding}."
    )


def _output(lane: Lane, step: Step, number: int, name: str, eager: bool) -> Tensor:
    lane.fill(step, number)
    if eager:
        lane.run_eager(step)
    else:
        lane.replay_timed(step)
    with lane.on_stream():
        output = step.outputs[name].detach().clone()
    lane.synchronize()
    return output
