"""What warm-up shows for each graph: what it holds, what it costs, and that it was verified."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphEvidence:
    """One row of the evidence table; None means that it was not measured.

    `nodes`, `kernels`, `pool_bytes`, `capture_seconds` and `replay_ms` exist only where there is a graph.
    `pool_bytes` is what this graph added to its lane's pool: later graphs reuse the blocks of earlier ones.
    `max_difference` is 0.0 once every output of every verification round was bit-equal to the eager run.
    """

    lane: str
    device: str
    step: str
    bucket: str
    nodes: int | None
    node_types: dict[str, int] | None
    kernels: dict[str, int] | None
    pool_bytes: int | None
    eager_ms: float | None
    replay_ms: float | None
    capture_seconds: float | None
    max_difference: float | None
