"""A target and a drafter on one GPU: on streams of their own, the target working ahead, against strictly in turn."""

import dataclasses

from draftgraph.engine.bench.protocol import Bench, Result
from draftgraph.engine.bench.steps import in_own_process
from draftgraph.engine.bench.workloads import PROFILE_08B, PROFILE_27B, load

# What overlaps does not depend on how many shapes there are, and each takes seconds to verify.
FEW_BUCKETS = ("buckets.count=4",)
STEADY = "real_tokens_per_s_steady"


def overlap(bench: Bench) -> Result:
    """Each way in a process of its own, on the same rows."""
    num_rows = (64 if bench.quick else 96) if bench.on_gpu else 8
    ours: dict[str, dict[str, float]] = {}
    for shapes, name in (("27b", PROFILE_27B), ("08b", PROFILE_08B)):
        ways = {"in_turn": 0, "ahead": 1}
        rows = {
            way: in_own_process(bench, load(bench, name, (*FEW_BUCKETS, f"placement.look_ahead={slots}")), num_rows)
            for way, slots in ways.items()
        }
        ours[shapes] = {f"{way}_{figure}": rows[way][figure] for way in ways for figure in (STEADY, "step_s_median")}
        ours[shapes]["ratio"] = rows["ahead"][STEADY] / rows["in_turn"][STEADY]
    return Result(
        profile=dataclasses.asdict(load(bench, PROFILE_27B, FEW_BUCKETS)),
        ours=ours,
        peer=None,
        ratio=ours["27b"]["ratio"],
        ours_text=f"{ours['27b'][f'ahead_{STEADY}']:,.0f} tok/s",
        peer_text=f"{ours['27b'][f'in_turn_{STEADY}']:,.0f} in turn",
        share_text="-",
        figures={"ratio": ours["27b"]["ratio"], "ratio_08b": ours["08b"]["ratio"]},
    )
