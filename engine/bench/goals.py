"""The workloads of `draftgraph bench` and what each is to reach: data, read without loading torch."""

from dataclasses import dataclass

WORKLOADS = {
    "w27-full": "training step at Qwen3.6-27B shapes, full rows of 4096 tokens, beside SpecForge's",
    "w27-var": "the same over recorded row lengths, in steady state and from models built to the last row",
    "w08-var": "training step at Qwen3.5-0.8B shapes over the same lengths: the launch-bound end",
    "target": "hidden-state extraction at 27B shapes, per bucket, captured, against the matmul ceiling",
    "overlap": "target and drafter on one GPU: the target working ahead on its own stream, against strictly in turn",
    "attention": "anchor attention, forward and backward, against flex_attention and the floor",
    "cross-entropy": "linear cross-entropy against its two matrix products alone, and its workspace",
    "observers": "every observer of a run (panel, samples, watch, loggers) against none, at 0.8B shapes",
    "optimizer": "optimizer step of the 27B drafter's 1.7 G parameters against copy bandwidth",
}


@dataclass(frozen=True)
class Goal:
    """What one figure of a workload has to reach."""

    figure: str
    bound: float
    at_most: bool = False

    def met(self, figures: dict[str, float | None]) -> bool | None:
        """None where the figure was not measured."""
        value = figures.get(self.figure)
        if value is None:
            return None
        return value <= self.bound if self.at_most else value >= self.bound


GOALS = {
    "w27-full": [Goal("ratio", 1.5)],
    "w27-var": [Goal("ratio", 1.8), Goal("ratio_inclusive", 1.5)],
    "w08-var": [Goal("ratio", 2.5), Goal("ratio_one_row", 6.0)],
    "target": [Goal("ceiling_share", 0.78)],
    "overlap": [Goal("ratio", 1.0), Goal("ratio_08b", 1.0)],
    "attention": [Goal("ratio", 1.3)],
    "cross-entropy": [Goal("time_over_products", 1.15, at_most=True), Goal("workspace_bytes", 2 * 2**30, at_most=True)],
    "observers": [Goal("added_percent", 0.5, at_most=True), Goal("host_syncs", 0, at_most=True)],
    "optimizer": [Goal("copy_share", 0.85)],
}
# With the target's products in FP8.
FP8_GOALS = GOALS | {
    "w27-full": [Goal("ratio", 2.0)],
    "w27-var": [Goal("ratio", 2.2), Goal("ratio_inclusive", 1.5)],
    "target": [],
}
