"""The peer on the same work: SpecForge's DFlash training step behind an eager Hugging Face target, on one GPU.

Needs the PyPI wheel `specforge` (0.2.0; `pip install --no-deps specforge==0.2.0`), torch, transformers; fla and
causal-conv1d for a GPU run (checked: the peer gets every fast path that it can have). Only its draft model, wrapper,
chunking and optimizer are imported, as they are. Random weights, no network.

    python peer_specforge.py --shapes 27b --rows 2 --full --total-rows 32     # w27-full
    python peer_specforge.py --shapes 27b --rows 2 --total-rows 256           # w27-var: lengths.json, in order
    python peer_specforge.py --shapes 0.8b --rows 4 --total-rows 256          # w08-var; try rows 1, 2, 4, 8
    python peer_specforge.py --shapes tiny --rows 2 --total-rows 8 --device cpu

Prints one JSON line. inclusive = real tokens over all the time since the models were built, compiling and tuning
included; steady = the same without steps longer than 3 medians. The optimizer runs every --update-rows rows (16),
gradients accumulated in between.
"""

import argparse
import importlib.util
import itertools
import json
import pathlib
import sys
import time
import types

import torch

# hidden, ffn, layers, heads, kv heads, head_dim, linear key heads, linear value heads, linear head dim, vocab,
# drafter ffn, drafter heads, drafter kv heads, drafter head_dim
SHAPES = {
    "27b": (5120, 17408, 64, 24, 4, 256, 16, 48, 128, 248320, 17408, 32, 8, 128),
    "0.8b": (1024, 3584, 24, 8, 2, 256, 16, 16, 128, 248320, 3072, 16, 8, 128),
    "tiny": (64, 128, 8, 4, 2, 16, 2, 4, 16, 512, 128, 4, 2, 16),
}
parser = argparse.ArgumentParser()
parser.add_argument("--shapes", choices=SHAPES, default="27b")
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--full", action="store_true")
parser.add_argument("--context", type=int, default=4096)
parser.add_argument("--anchors", type=int, default=512)
parser.add_argument("--total-rows", type=int, default=64)
parser.add_argument("--update-rows", type=int, default=16)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
D, FFN, L, NH, NKV, HD, LK, LV, LD, V, DFFN, DH, DKV, DHD = SHAPES[args.shapes]
cpu = args.device == "cpu"
if args.shapes == "tiny":
    args.context, args.anchors = min(args.context, 128), min(args.anchors, 8)
dtype = torch.float32 if cpu else torch.bfloat16

root = pathlib.Path(importlib.util.find_spec("specforge").origin).parent.parent
for name in [
    "specforge",
    "specforge.core",
    "specforge.modeling",
    "specforge.modeling.draft",
    "specforge.algorithms",
    "specforge.algorithms.common",
]:
    module = types.ModuleType(name)  # skip the packages' __init__, which import its server
    module.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[name] = module
quiet = types.ModuleType("specforge.utils")
quiet.print_on_rank0 = lambda *a, **k: None
sys.modules["specforge.utils"] = quiet
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # noqa: E402
from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: E402
from specforge.optimizer import BF16Optimizer  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config  # noqa: E402
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig  # noqa: E402
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel  # noqa: E402

torch.manual_seed(0)
taps = [round(1 + i * (L - 4) / 4) for i in range(5)] if L > 8 else [1, 3, 5]
target_config = Qwen3_5TextConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=FFN,
    num_hidden_layers=L,
    num_attention_heads=NH,
    num_key_value_heads=NKV,
    head_dim=HD,
    linear_num_key_heads=LK,
    linear_num_value_heads=LV,
    linear_key_head_dim=LD,
    linear_value_head_dim=LD,
)
target_config._attn_implementation = "sdpa"
draft_config = Qwen3Config(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=DFFN,
    num_hidden_layers=len(taps),
    num_attention_heads=DH,
    num_key_value_heads=DKV,
    head_dim=DHD,
    use_sliding_window=True,
    sliding_window=min(2048, args.context // 2),
    max_window_layers=len(taps),
    layer_types=["sliding_attention"] * (len(taps) - 1) + ["full_attention"],
    rope_theta=1e7,
)
draft_config.block_size, draft_config.num_target_layers = 16, L
draft_config.dflash_config = {"mask_token_id": V - 2, "target_layer_ids": taps}
backend = "sdpa" if cpu else "flex_attention"
draft_config._attn_implementation = backend
with torch.device(args.device):
    torch.set_default_dtype(dtype)
    target, head, draft = (
        Qwen3_5TextModel(target_config).eval(),
        torch.nn.Linear(D, V, bias=False),
        DFlashDraftModel(draft_config),
    )
    torch.set_default_dtype(torch.float32)
for p in [*target.parameters(), *head.parameters()]:
    p.requires_grad_(False)
model = OnlineDFlashModel(
    draft,
    head,
    target.embed_tokens,
    mask_token_id=V - 2,
    block_size=16,
    attention_backend=backend,
    num_anchors=args.anchors,
    loss_decay_gamma=7.0,
).train()
optimizer = BF16Optimizer(draft, lr=6e-4, max_grad_norm=1.0, total_steps=10000, warmup_ratio=0.04)
hidden = {}
for i in taps:
    target.layers[i].register_forward_hook(
        lambda m, a, o, i=i: hidden.__setitem__(i, o[0] if isinstance(o, tuple) else o)
    )

lengths = json.loads((pathlib.Path(__file__).parent / "lengths.json").read_text())["lengths"]
generator, cursor = torch.Generator().manual_seed(1), 0


def batch():
    global cursor
    rows = [args.context if args.full else min(args.context, n) for n in lengths[cursor : cursor + args.rows]]
    cursor += args.rows
    ids, loss_mask, mask = (
        torch.zeros(args.rows, max(rows), dtype=torch.long),
        torch.zeros(args.rows, max(rows)),
        torch.zeros(args.rows, max(rows), dtype=torch.long),
    )
    for r, n in enumerate(rows):
        ids[r, :n] = torch.randint(0, V - 8, (n,), generator=generator)
        loss_mask[r, n // 4 : n], mask[r, :n] = 1, 1
    return ids.to(args.device), loss_mask.to(args.device), mask.to(args.device), sum(rows)


def extract(ids, mask):
    with torch.no_grad():
        target(input_ids=ids, attention_mask=mask, use_cache=False)
        return torch.cat([hidden[i] for i in taps], -1)


pending = 0


def step(b):
    global pending
    ids, loss_mask, mask, _ = b
    loss, _, _ = model(ids, extract(ids, mask), loss_mask)
    (loss * args.rows / args.update_rows).backward()
    pending += args.rows
    if pending >= args.update_rows:
        optimizer.step()
        pending = 0
    return loss.detach()


def sync():
    if not cpu:
        torch.cuda.synchronize()


def used():
    if cpu:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


if not cpu:
    import causal_conv1d  # noqa: F401  the peer must not run on a fallback
    import fla  # noqa: F401
times, real, padded, memory = [], [], [], []
for _ in range(args.total_rows // args.rows):
    t = time.perf_counter()
    b = batch()
    loss = step(b)
    sync()
    times.append(time.perf_counter() - t)
    real.append(b[3])
    padded.append(b[0].numel())
    memory.append(used())
median = sorted(times)[len(times) // 2]
steady = [(t, n) for t, n in zip(times, real, strict=True) if t <= 3 * median]
out = {
    "peer": "specforge",
    "shapes": args.shapes,
    "rows": args.rows,
    "full": args.full,
    "steps": len(times),
    "update_rows": args.update_rows,
    "real_tokens_per_s_inclusive": round(sum(real) / sum(times), 1),
    "real_tokens_per_s_steady": round(sum(n for _, n in steady) / sum(t for t, _ in steady), 1),
    "stalled_steps": len(times) - len(steady),
    "step_s_median": round(median, 4),
    "step_s_max": round(max(times), 3),
    "padding_efficiency": round(sum(real) / sum(padded), 3),
    "used_GiB_range": [round(min(memory), 2), round(max(memory), 2)],
    "loss": round(float(loss), 4),
}
if not cpu:
    from torch.profiler import ProfilerActivity, profile

    b = batch()
    sync()
    marks = [time.perf_counter()]
    states = extract(b[0], b[2])
    sync()
    marks.append(time.perf_counter())
    loss, _, _ = model(b[0], states, b[1])
    sync()
    marks.append(time.perf_counter())
    loss.backward()
    sync()
    marks.append(time.perf_counter())
    optimizer.step()
    sync()
    marks.append(time.perf_counter())
    parts = [round(later - earlier, 4) for earlier, later in itertools.pairwise(marks)]
    out["split_s"] = dict(zip(["target", "forward", "backward", "optimizer"], parts, strict=True))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        step(batch())
        sync()
    events = p.key_averages()
    out["launches"], out["host_syncs"] = (
        sum(e.count for e in events if word in e.key) for word in ("Launch", "Synchronize")
    )
    out["gpu"], out["torch"] = torch.cuda.get_device_name(), torch.__version__
print(json.dumps(out))
