"""From a plan to the rig: models loaded, buffers taken, lanes filled. All memory is taken here or at capture."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import collate
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.data.schedule import MicroBatch, Schedule
from draftgraph.engine.errors import RunError, UsageError
from draftgraph.engine.held_out import HeldOut, prompts_of
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.forward import refuse_fp8
from draftgraph.engine.models.ops import require_fast_ops
from draftgraph.engine.models.released import initialise, require_same_shape
from draftgraph.engine.models.target import Target, load_model
from draftgraph.engine.plan import Plan
from draftgraph.engine.run.buffers import BatchBuffer, BatchViews
from draftgraph.engine.run.lanes import DrafterLane, DrafterParts, TargetLane
from draftgraph.engine.run.reduce import Across, Reduction
from draftgraph.engine.run.rig import HandOffSlot, Rig
from draftgraph.engine.show import bytes_text
from draftgraph.kernels.anchor_attention import TILES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`cpu` or `cuda:N`, checked against the machine.

    Raises:
        UsageError: no such device here.
    """
    device = torch.device(name)
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if device.index >= found:
            raise UsageError(
                f"profile: placement names {name}, this machine has {found} CUDA devices; "
                "use a CPU profile (smollm2-cpu), or, for a small target, --set 'placement.targets=[\"cpu\"]' "
                "'placement.drafters=[\"cpu\"]' capture.mode=eager"
            )
    return device


class VerificationData:
    """Real rows for the rounds of warm-up and verification, collated as the data process collates them.

    In every second round the last slot has no row, as in micro-batches of the schedule that are not full.
    """

    def __init__(self, plan: Plan):
        self.plan = plan

    def rows_of(self, bucket: Bucket, round_index: int) -> MicroBatch:
        index = self.plan.buckets.index(bucket)
        candidates = np.flatnonzero(self.plan.assignment == index)
        slots = np.arange(bucket.rows - round_index % 2)
        chosen = candidates[(round_index * bucket.rows + slots) % len(candidates)]
        return MicroBatch(round_index, index, chosen, round_index)

    def fill(self, bucket: Bucket, round_index: int, views: BatchViews) -> None:
        """Write the micro-batch of a round into a bucket's views, on the current stream."""
        layout = self.plan.layouts[bucket]
        host = layout.numpy_views(np.zeros(layout.num_bytes, dtype=np.uint8))
        collate(self.rows_of(bucket, round_index), self.plan.rows, host, self.plan.draw)
        for name, values in host.items():
            view = getattr(views, name)
            view.copy_(torch.from_numpy(values).view(view.dtype))


@dataclass(frozen=True)
class Engine:
    """Everything that a run replays, and where its data comes from."""

    plan: Plan
    rig: Rig
    targets: list[Target]
    schedule: Schedule
    data: VerificationData
    held_out: HeldOut | None

    @property
    def lanes(self) -> list[Lane]:
        """All that is warmed up and captured: those that train, and the one that evaluates."""
        return self.rig.lanes + ([self.held_out.decoder.lane] if self.held_out else [])

    @property
    def devices(self) -> list[torch.device]:
        return sorted({lane.device for lane in self.rig.lanes}, key=str)

    def initialise(self) -> None:
        """The state before step 1, from the profile's seed or `drafter.init`; every drafter the same."""
        seed, section = self.plan.profile.run.seed, self.plan.profile.drafter
        first, *others = self.rig.drafters
        first.initialise(partial(initialise, init=section.init, seed=seed, std=section.init_std))
        for drafter in others:  # a copy: two billion numbers take a CPU half a minute
            drafter.initialise(lambda module: module.load_state_dict(first.drafter.state_dict()))

    def rows_of(self, step: int) -> str:
        """How to see the rows that a step trained on, which are dealt again from the schedule."""
        section, accumulate = self.plan.profile, self.plan.accumulate
        first, last = (step - 1) * accumulate, step * accumulate - 1
        first, last = first // section.drafter.reuse, last // section.drafter.reuse
        batches = islice(self.schedule.at(first), last - first + 1)
        rows = sorted({int(self.plan.rows.row_ids[row]) for batch in batches for row in batch.row_ids})
        named, folder = ",".join(map(str, rows)), section.data.shards
        if not folder:
            return f"rows {named} of {section.data.random_lengths}"
        command = ["draftgraph", "prepare", folder, "--target", section.target.model, "--show-rows", named]
        return f"to see its rows: {shlex.join(command)}"

    @contextmanager
    def loader(self, first: int) -> Iterator[tuple[Loader, Rig]]:
        """The data process from micro-batch `first` on, and the rig with its host slots (pinned for a GPU)."""
        pinned = any(device.type == "cuda" for device in self.devices)
        layouts = [self.plan.layouts[bucket] for bucket in self.plan.buckets]
        num_slots = self.rig.max_in_flight + 1
        with Loader(self.plan.rows, self.schedule, layouts, self.plan.draw, num_slots=num_slots, first=first) as loader:
            slots = [torch.from_numpy(buffer) for buffer in loader.buffers]
            try:
                if pinned:
                    for slot in slots:
                        pin(slot)
                yield loader, replace(self.rig, host_slots=slots)
            finally:
                if pinned:
                    for device in (device for device in self.devices if device.type == "cuda"):
                        torch.cuda.synchronize(device)
                    for slot in slots:
                        torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()


def pin(slot: Tensor) -> None:
    """Register shared memory with CUDA, so that copies from it are asynchronous."""
    status = torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)
    if int(status) != 0:
        raise RunError(f"cannot pin {slot.nbytes} bytes of shared memory (CUDA status {status}); raise `ulimit -l`")


def load_targets(
    plan: Plan,
    devices: Sequence[torch.device],
    max_context: int,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> dict[torch.device, Target]:
    """The target on each device, read once, compared with its module, and in FP8 where the profile says so.

    Raises:
        UsageError: the model is missing, or FP8 is not possible.
        CaptureError: the target's family cannot be run by this engine.
    """
    section, layers = plan.profile.target, plan.shape.target_layer_ids
    refuse_fp8(plan.profile)
    last = None if plan.whole_target else plan.last_layer
    models: dict[torch.device, Any] = {}
    for device in dict.fromkeys(devices):
        say(f"loading {section.model} on {device}")
        since, source = time.perf_counter(), next(iter(models.values()), None)
        arguments = (DTYPES[section.dtype], device, plan.profile.run.seed, last, source, progress)
        models[device] = load_model(section.model, *arguments)
        size = sum(parameter.nbytes for parameter in models[device].parameters())
        say(f"loaded {bytes_text(size)} in {time.perf_counter() - since:.1f} s")
    targets = {}
    for device, model in models.items():
        targets[device] = target = Target(model, layers, max_context, section.forward, plan.rule.labels != "data")
        if target.fused is None:
            require_fast_ops(model, device, plan.profile.capture.allow_fallback)
        if device.type == "cuda":
            largest = max(plan.buckets, key=lambda bucket: bucket.rows * bucket.context)
            target.tune(largest.rows, largest.context)
        target.check_against_module()
        if section.precision == "fp8":
            longest = plan.rows[int(plan.lengths.argmax())][0].astype(np.int64)
            target.quantise(torch.from_numpy(longest)[None].to(device))
    return targets


def build(
    plan: Plan,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
    across: Across | None = None,
) -> Engine:
    """Load the models and take the buffers. The drafters' weights are those of step 1 only after `initialise`.

    Args:
        say: receives one line per slow part.
        progress: shows how far the weights are.
        across: sums over hosts, where there are several.
    Raises:
        UsageError: a device, a model or the prompts of [eval] are missing.
        CaptureError: the target's family cannot be run by this engine.
    """
    profile = plan.profile
    if profile.drafter.init:
        require_same_shape(Path(profile.drafter.init), plan.shape)
    dtype = DTYPES[profile.target.dtype]
    target_devices = [resolve_device(name) for name in profile.placement.targets]
    drafter_devices = [resolve_device(name) for name in profile.placement.drafters]
    max_context = max(b.context for b in plan.buckets)
    mode = profile.capture.mode
    data = VerificationData(plan)
    prompts = prompts_of(plan) if profile.eval.every else []

    loaded = load_targets(plan, target_devices, max_context, say, progress)
    targets, target_lanes = [loaded[device] for device in target_devices], []
    for t, (target, device) in enumerate(zip(targets, target_devices, strict=True)):
        batch = BatchBuffer(plan.layouts, plan.taps_size, dtype, device)
        target_lanes.append(TargetLane(f"target {t}", target, batch, mode, data.fill))

    drafter_lanes, rings = [], []
    for d, device in enumerate(drafter_devices):
        if device.type == "cuda" and (dtype.itemsize, plan.shape.head_dim) not in TILES:
            known = sorted(head_dim for size, head_dim in TILES if size == dtype.itemsize)
            raise UsageError(
                f"profile: drafter.head_dim = {plan.shape.head_dim} has no attention kernel; known: {known}"
            )
        # The target's own embedding and lm_head where it is on this device, a copy elsewhere.
        source = targets[target_devices.index(device) if device in target_devices else 0]
        with device:  # a billion parameters are made where they live
            drafter = Drafter(plan.shape, max_context, profile.drafter.recompute)
        embedding = source.embedding.to(device)
        tied = source.lm_head.data_ptr() == source.embedding.data_ptr()
        parts = DrafterParts(
            drafter,
            embedding,
            embedding if tied else source.lm_head.to(device),
            plan.rule,
            profile.drafter.chunk_slots,
            profile.optim,
            profile.run.steps,
        )
        look_ahead = profile.placement.look_ahead
        batch = BatchBuffer(plan.layouts, plan.taps_size, dtype, device) if look_ahead else target_lanes[0].batch
        drafter_lanes.append(
            DrafterLane(f"drafter {d}", parts, batch, device, mode, data.fill, d, len(drafter_devices), plan.hosts)
        )
        ring = [
            HandOffSlot(BatchBuffer(plan.layouts, plan.taps_size, dtype, device), device) for _ in range(look_ahead)
        ]
        rings.append(ring)
    rig = Rig(
        targets=target_lanes,
        drafters=drafter_lanes,
        rings=[ring for ring in rings if ring],
        reduction=Reduction(drafter_lanes, across),
        host_slots=[],
        buckets=plan.buckets,
    )
    held_out = HeldOut(plan, prompts, targets[0], drafter_lanes[0]) if prompts else None
    return Engine(plan, rig, targets, plan.schedule, data, held_out)
