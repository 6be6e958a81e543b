"""The profiles that are measured: the shipped ones on a GPU, the same at tiny shapes on a CPU."""

from draftgraph.engine.bench.protocol import Bench
from draftgraph.engine.config import Profile, load_profile

PROFILE_27B = "qwen3.6-27b-1gpu"
PROFILE_08B = "qwen3.5-0.8b-1gpu"

# The shapes that peer_specforge.py calls tiny.
TINY = [
    *("target.model=random:qwen3.5-tiny", "target.dtype=float32", "drafter.mask_token_id=510"),
    *("drafter.layers=3", "drafter.target_layer_ids=[1, 3, 5]", "drafter.anchors=8", "drafter.intermediate_size=128"),
    *("drafter.heads=4", "drafter.kv_heads=2", "drafter.head_dim=16", "drafter.chunk_slots=256"),
    *("drafter.sliding_layers=2", "drafter.sliding_window=64"),
    *("buckets.count=3", "buckets.max_context=256", "buckets.context_tokens=512", "buckets.draft_tokens=256"),
    *("placement.targets=['cpu']", "placement.drafters=['cpu']", "optim.accumulate=2"),
    *("capture.mode=eager", "capture.warmup_rounds=1", "capture.verify_rounds=1"),
]


def load(bench: Bench, name: str, assignments: tuple[str, ...] = ()) -> Profile:
    """A shipped profile, with what the workload and then the user sets; what is measured is training alone."""
    return load_profile(name, [*([] if bench.on_gpu else TINY), "eval.every=0", *assignments, *bench.assignments])
