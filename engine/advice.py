"""What to change in a profile whose steps do not fit into a device: sizes that `plan` predicts to fit."""

import dataclasses
from collections.abc import Collection

import torch

from draftgraph.engine.build import resolve_device
from draftgraph.engine.config import Profile
from draftgraph.engine.errors import DraftgraphError
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.predict.memory import device_bytes
from draftgraph.engine.show import bytes_text

HEADROOM = 0.9  # of a device, for what a prediction does not see: the context, libraries, executables


# Parts that no bucket makes smaller.
OF_MODELS = ("weights", "gradients", "states")


def predicted_bytes(plan: Plan, device: torch.device, parts: Collection[str] = ()) -> int:
    """Everything that `plan` expects on one device, or some parts of it."""
    return sum(
        size
        for role, found in device_bytes(plan).items()
        if resolve_device(role.split(" on ")[1]) == device
        for part, size in found.items()
        if not parts or part in parts
    )


def smaller(profile: Profile, divisor: int) -> Profile:
    """The same run with a part of the draft tokens, context tokens and logits at once, where they can shrink."""
    buckets, drafter = profile.buckets, profile.drafter
    one_row = drafter.anchors * drafter.block_size
    return dataclasses.replace(
        profile,
        buckets=dataclasses.replace(
            buckets,
            context_tokens=max(buckets.context_tokens // divisor, buckets.max_context),
            draft_tokens=max(buckets.draft_tokens // divisor, one_row),
        ),
        drafter=dataclasses.replace(drafter, chunk_slots=max(drafter.chunk_slots // divisor, drafter.block_size)),
    )


def advice(plan: Plan, device: torch.device) -> str:
    """Which keys to lower, to which values, and what is predicted then, for a device that ran out of memory."""
    now = predicted_bytes(plan, device)
    told = f"`plan` predicts {bytes_text(now)} for {device}"
    drafter = dataclasses.replace(plan.profile.drafter, recompute=True)
    recomputing = dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, drafter=drafter))
    if (less := predicted_bytes(recomputing, device)) < now:
        told += f", {bytes_text(less)} with --set drafter.recompute=true"
    # A prediction that said it would fit was wrong: ask for clearly less than it.
    limit = 0.75 * now
    if device.type == "cuda":
        limit = min(limit, HEADROOM * torch.cuda.mem_get_info(device)[1])
    if (models := predicted_bytes(plan, device, OF_MODELS)) > limit:
        return (
            f"{told}, of which models take {bytes_text(models)} whatever the buckets: make the drafter smaller "
            "(drafter.layers, drafter.intermediate_size), or place fewer roles on the device"
        )
    for divisor in (2, 4, 8, 16):
        profile = smaller(plan.profile, divisor)
        try:
            then = predicted_bytes(make_plan(profile), device)
        except DraftgraphError:
            continue  # the data needs more than that
        if then <= limit:
            buckets, drafter = profile.buckets, profile.drafter
            return (
                f"{told}; {bytes_text(then)} with --set buckets.draft_tokens={buckets.draft_tokens} "
                f"buckets.context_tokens={buckets.context_tokens} drafter.chunk_slots={drafter.chunk_slots}"
            )
    return (
        f"{told}, and smaller buckets do not bring it below {bytes_text(limit)}: lower buckets.max_context or "
        "drafter.anchors, or place fewer roles on the device"
    )
