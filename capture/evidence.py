"""What warm-up shows for each graph: what it holds, what it costs, and that it was verified."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphEvidence:
    """One row of the evidence table; None means that it was not measured.

    `nodes`, `kernels`, `pool_bytes`, `capture_seconds` and `replay_ms` exist only where there is a graph.
    `families`: kernels per family; `implementations`: family -> who implements it, both read from the graph.
    `eager_launches` is what the host issues to run the step eagerly: its kernels, copies and memsets; a replay is one.
    `pool_bytes` is what this graph added to its lane's pool: later graphs reuse the blocks of earlier ones.
    `executable_bytes` is what the driver took at its instantiation.
    `gemm_flops` are those of the matrix products that torch issues; kernels of fla and our own are not counted.
    `gemm_fp8_flops` are those of them in FP8.
    `guard_us` is the host time of one check of the inputs.
    `max_difference` is 0.0 once every output of every verification round was bit-equal to the eager run.
    """

    lane: str
    device: str
    step: str
    bucket: str
    nodes: int | None
    node_types: dict[str, int] | None
    kernels: dict[str, int] | None
    families: dict[str, int] | None
    implementations: dict[str, list[str]] | None
    eager_launches: int | None
    replay_launches: int | None
    pool_bytes: int | None
    executable_bytes: int | None
    capture_seconds: float | None
    eager_ms: float | None
    replay_ms: float | None
    gemm_flops: int | None
    gemm_fp8_flops: int | None
    guard_us: float | None
    max_difference: float | None
