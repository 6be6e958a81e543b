"""Kernels alone: anchor attention, linear cross-entropy, the optimizer step; each correct first, then timed.

The shapes are those of a full micro-step of the shipped profiles: 2 rows of 4096 tokens, 512 anchors, blocks of 16.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftgraph.engine.bench.peer import flex
from draftgraph.engine.bench.protocol import Bench, Result, measure, random_like, relative_error
from draftgraph.engine.bench.workloads import PROFILE_08B, PROFILE_27B, load
from draftgraph.engine.errors import RunError
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.loss import LossRule, dflash_loss
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run.buffers import BatchBuffer
from draftgraph.engine.run.lanes import DrafterLane, DrafterParts, random_fill
from draftgraph.engine.run.metrics import WEIGHT
from draftgraph.engine.run.optimizer import rate
from draftgraph.kernels import reference
from draftgraph.kernels.anchor_attention import anchor_attention

# Largest max|difference| / max|truth| against float32; bf16 inputs.
TOLERANCE = 2e-2
# Bytes of a parameter's step: the gradient read for the norm; gradient, master and two moments read; master, moments
# and the bf16 value written; the gradient zeroed.
OPTIMIZER_BYTES = 4 + 16 + 12 + 2 + 4

# (R, S, A, K, H, G, C) and the window.
AttentionCase = tuple[tuple[int, int, int, int, int, int, int], int | None]
ATTENTION_CASES: dict[str, AttentionCase] = {
    "27b full": ((2, 4096, 512, 16, 32, 8, 128), None),
    "27b window": ((2, 4096, 512, 16, 32, 8, 128), 2048),
    "0.8b full": ((2, 4096, 512, 16, 16, 8, 128), None),
    "0.8b window": ((2, 4096, 512, 16, 16, 8, 128), 2048),
}
TINY_CASES: dict[str, AttentionCase] = {
    "tiny full": ((2, 64, 6, 4, 4, 2, 16), None),
    "tiny window": ((2, 64, 6, 4, 4, 2, 16), 24),
}


def require(what: str, error: float, allowed: float = TOLERANCE) -> float:
    """Refuse to time what is wrong."""
    if not error <= allowed:
        raise RunError(f"bench: {what} differs from the float32 truth by {error:.1e} (allowed {allowed:.0e})")
    return error


def attention(bench: Bench) -> Result:
    cases = ATTENTION_CASES if bench.on_gpu else TINY_CASES
    names = list(cases)[:2] if bench.quick else list(cases)
    ours, peer = {}, {}
    for name in names:
        bench.say(f"attention, {name}")
        ours[name], peer[name] = attention_case(bench, *cases[name])
    key = "forward_backward_ms"
    ratios = {name: peer[name][key] / ours[name][key] for name in names if peer[name][key] is not None}
    worst = min(ratios, key=ratios.__getitem__, default=names[0])
    ratio, share = ratios.get(worst), ours[worst]["ceiling_share"]
    shares = [ours[name]["ceiling_share"] for name in names if ours[name]["ceiling_share"] is not None]
    return Result(
        profile=PROFILE_27B,
        ours=ours,
        peer=peer,
        ratio=ratio,
        ours_text=f"{ours[worst][key]:.2f} ms",
        peer_text=f"{peer[worst][key]:.2f} ms" if ratio is not None else "-",
        share_text=f"{share:.2f} ceiling" if share is not None else "-",
        figures={"ratio": ratio, "ceiling_share": min(shares, default=None)},
    )


def attention_case(bench: Bench, sizes: tuple[int, ...], window: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and flex_attention on the same inputs: (ours, peer)."""
    R, S, A, K, H, G, C = sizes
    scale = C**-0.5
    ours: Callable[..., Tensor] = anchor_attention if bench.on_gpu else reference.anchor_attention
    error = require("anchor attention", attention_error(bench, ours, (R, 384, 40, K, H, G, C), window and 100))

    inputs = attention_inputs(bench.device, sizes)
    leaves = [tensor.requires_grad_() for tensor in inputs[:5]]
    dout = random_like(bench.device, (R, A, K, H, C), 9)

    def forward() -> Tensor:
        return ours(*leaves, *inputs[5:], window, scale)

    peer = flex()
    peer_leaves = peer.layout(*(leaf.detach() for leaf in leaves))
    peer_dout = dout.flatten(1, 2).transpose(1, 2).contiguous()
    masks: list[Any] = []

    def build_mask() -> None:
        masks[:] = [peer.block_mask(inputs[5], inputs[6], S, K, window)]

    mask_ms = measure(bench.device, {"mask": build_mask}, warmup=1)["mask"]

    def peer_forward() -> Tensor:
        return peer.attend(*peer_leaves, masks[0], scale)

    theirs = peer_forward().detach().transpose(1, 2).unflatten(1, (A, K))
    variants: dict[str, Callable[[], object]] = {
        "forward": forward,
        "forward+backward": lambda: torch.autograd.grad(forward(), leaves, dout),
        "peer forward": peer_forward,
    }
    if bench.on_gpu:  # flex_attention has no backward on the CPU
        variants["peer forward+backward"] = lambda: torch.autograd.grad(peer_forward(), peer_leaves, peer_dout)
    difference = require("flex_attention from ours; one of them", relative_error(theirs, forward().detach()))
    ms = measure(bench.device, variants)
    pairs = H * visible_pairs(inputs[5], K, window)
    return (
        {
            "forward_ms": ms["forward"],
            "forward_backward_ms": ms["forward+backward"],
            "visible_pairs": pairs,
            "forward_ceiling_share": bench.share_of_ceiling(4.0 * C * pairs, ms["forward"]),
            "ceiling_share": bench.share_of_ceiling(14.0 * C * pairs, ms["forward+backward"]),
            "error": error,
        },
        {
            "forward_ms": ms["peer forward"],
            "forward_backward_ms": ms.get("peer forward+backward"),
            "mask_ms": mask_ms,  # in neither of the above
            "difference_from_ours": difference,
        },
    )


def attention_inputs(device: torch.device, sizes: tuple[int, ...]) -> list[Tensor]:
    """The seven tensors of `anchor_attention`; A anchors anywhere in a row, all valid."""
    R, S, A, K, H, G, C = sizes
    shapes = [(R, A, K, H, C), (R, S, G, C), (R, S, G, C), (R, A, K, G, C), (R, A, K, G, C)]
    floats = [random_like(device, shape, seed) for seed, shape in enumerate(shapes)]
    return [*floats, anchors_of(R, S, A, device), torch.ones(R, A, dtype=torch.bool, device=device)]


def anchors_of(num_rows: int, num_context: int, num_anchors: int, device: torch.device) -> Tensor:
    """[R, A] int32, ascending, drawn without replacement."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(num_context, generator=generator)[:num_anchors].sort().values for _ in range(num_rows)]
    return torch.stack(rows).int().to(device)


def attention_error(bench: Bench, ours: Callable[..., Tensor], sizes: tuple[int, ...], window: int | None) -> float:
    """The largest relative error of output and gradients against the twin in float32 (float64 where ours is that)."""
    inputs = attention_inputs(bench.device, sizes)
    truth_dtype = torch.float32 if bench.on_gpu else torch.float64
    dout = random_like(bench.device, tuple(inputs[0].shape), 9)

    def results(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs[:5]]
        out = attend(*leaves, *inputs[5:], window, sizes[-1] ** -0.5)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    found, truth = results(ours, inputs[0].dtype), results(reference.anchor_attention, truth_dtype)
    return max(relative_error(a, b) for a, b in zip(found, truth, strict=True))


def visible_pairs(positions: Tensor, block_size: int, window: int | None) -> int:
    """Query-key pairs that the mask allows, per head."""
    anchors = positions.long()[..., None].expand(-1, -1, block_size)
    slots = torch.arange(block_size, device=positions.device)
    if window is None:
        return int((anchors + block_size).sum())
    return int((torch.minimum(anchors, (window - 1 - slots).clamp(min=0)) + slots + 1).sum())


def cross_entropy(bench: Bench) -> Result:
    # (V, D, R, S, A, K) and the profile that says how many rows of logits are held at once.
    cases = {
        "27b": ((248320, 5120, 2, 4096, 512, 16), PROFILE_27B),
        "0.8b": ((248320, 1024, 2, 4096, 512, 16), PROFILE_08B),
    }
    if not bench.on_gpu:
        cases = {"tiny": ((512, 64, 2, 64, 8, 4), PROFILE_27B)}
    ours, peer = {}, {}
    for name, (sizes, profile) in cases.items():
        bench.say(f"cross-entropy, {name}")
        ours[name], peer[name] = cross_entropy_case(bench, sizes, load(bench, profile).drafter.chunk_slots)
    worst = max(cases, key=lambda name: ours[name]["ms"] / peer[name]["ms"])
    over = ours[worst]["ms"] / peer[worst]["ms"]
    workspaces = [row["workspace_bytes"] for row in ours.values()]
    share = ours[worst]["ceiling_share"]
    return Result(
        profile=PROFILE_27B,
        ours=ours,
        peer=peer,
        ratio=1 / over,
        ours_text=f"{ours[worst]['ms']:.1f} ms",
        peer_text=f"{peer[worst]['ms']:.1f} ms",
        share_text=f"{share:.2f} ceiling" if share is not None else "-",
        figures={
            "ratio": 1 / over,
            "time_over_products": over,
            "workspace_bytes": max(workspaces) if bench.on_gpu else None,
        },
    )


def cross_entropy_case(bench: Bench, sizes: tuple[int, ...], chunk_slots: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss and gradient of one micro-step, and its two matrix products alone, in the same chunks: (ours, peer)."""
    V, D, R, S, A, K = sizes
    device, rule = bench.device, LossRule("decay", 7.0)
    hidden = random_like(device, (R, A, K, D), 0).requires_grad_()
    lm_head = random_like(device, (V, D), 1, std=D**-0.5)
    input_ids = torch.randint(V, (R, S), generator=torch.Generator().manual_seed(2)).to(device)
    loss_mask = torch.ones(R, S, dtype=torch.bool, device=device)
    anchors = anchors_of(R, S, A, device)
    valid = torch.ones(R, A, dtype=torch.bool, device=device)

    def loss_and_gradient(states: Tensor = hidden, num_anchors: int = A) -> tuple[Tensor, Tensor]:
        chosen = anchors[:, :num_anchors], valid[:, :num_anchors]
        sums = dflash_loss(states, lm_head, input_ids, loss_mask, *chosen, rule, chunk_slots)
        return sums.loss.detach(), torch.autograd.grad(sums.loss, states)[0]

    few = hidden.detach()[:, :8].clone().requires_grad_()
    found = loss_and_gradient(few, few.shape[1])
    truth = loss_truth(few, lm_head, input_ids, anchors[:, : few.shape[1]], rule.gamma)
    errors = [relative_error(a, b) for a, b in zip(found, truth, strict=True)]
    error = require("the loss or its gradient", max(errors))
    del few, found, truth

    slots = R * A * (K - 1)
    chunk = max(1, chunk_slots // (K - 1)) * (K - 1)
    states = hidden.detach()[:, :, 1:].flatten(0, 2)
    logits, gradient = states.new_empty(min(chunk, slots), V), torch.empty_like(states)

    def products() -> None:
        for start in range(0, slots, chunk):
            part = slice(start, min(start + chunk, slots))
            rows = logits[: part.stop - start]
            torch.mm(states[part], lm_head.T, out=rows)
            torch.mm(rows, lm_head, out=gradient[part])

    # Work that the host issues ahead of: launches are a captured step's own, not those of this loop.
    ms = measure(device, {"ours": loss_and_gradient, "products": products}, prepare=products)
    workspace = None
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss_and_gradient()
        workspace = torch.cuda.max_memory_allocated(device) - before
    flops = 4.0 * slots * V * D
    return (
        {
            "ms": ms["ours"],
            "slots": slots,
            "chunk_slots": chunk,
            "workspace_bytes": workspace,
            "ceiling_share": bench.share_of_ceiling(flops, ms["ours"]),
            "error": error,
        },
        {"ms": ms["products"], "ceiling_share": bench.share_of_ceiling(flops, ms["products"])},
    )


def loss_truth(
    hidden: Tensor, lm_head: Tensor, input_ids: Tensor, anchors: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Sum of weighted losses and its gradient to `hidden`, [R, A, K, D], in float32 by autograd."""
    states = hidden.detach().float().requires_grad_()
    num_context, slots = input_ids.shape[1], torch.arange(1, hidden.shape[2], device=hidden.device)
    positions = anchors.long()[..., None] + slots  # [R, A, K-1]
    labels = input_ids.gather(1, positions.clamp(max=num_context - 1).flatten(1)).view(positions.shape)
    weights = (positions < num_context) * torch.exp(-(slots - 1) / gamma)
    losses = F.cross_entropy((states[:, :, 1:] @ lm_head.float().T).flatten(0, 2), labels.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum()
    return loss.detach(), torch.autograd.grad(loss, states)[0]


def optimizer(bench: Bench) -> Result:
    """Norm, clip, AdamW, low-precision copy and zeroing, as a drafter's lane runs them, against a plain copy."""
    profile = load(bench, PROFILE_27B)
    plan = make_plan(profile)
    bench.say(f"optimizer, {plan.shape.num_parameters:,} parameters")
    dtype = random_like(bench.device, (1,), 0).dtype
    bucket = plan.buckets[0]
    with bench.device:
        drafter = Drafter(plan.shape, max_context=bucket.context)
        nothing = torch.zeros(1, 1, dtype=dtype)  # embedding and lm_head, which the step does not touch
    batch = BatchBuffer({bucket: plan.layouts[bucket]}, plan.taps_size, dtype, bench.device)
    parts = DrafterParts(
        drafter, nothing, nothing, plan.rule, profile.drafter.chunk_slots, profile.optim, profile.run.steps
    )
    lane = DrafterLane("drafter 0", parts, batch, bench.device, "eager", lambda *_: None)
    lane.random_weights(0)
    lane.optimizer.reset()

    def prepare() -> None:
        random_fill(lane.flat.grads, 1)
        lane.total.fill_(100.0)

    prepare()
    error = require("the first step of AdamW", optimizer_error(lane), 1e-3)
    source = torch.empty(min(lane.flat.size, 2**30), device=bench.device)
    random_fill(source, 2)
    target = torch.empty_like(source)
    ms = measure(bench.device, {"step": lane.measure_and_update, "copy": lambda: target.copy_(source)}, prepare)
    copied = 2.0 * source.nbytes / ms["copy"] * 1e3
    moved = float(OPTIMIZER_BYTES * lane.flat.size) / ms["step"] * 1e3
    share = moved / copied if bench.on_gpu else None
    return Result(
        profile=PROFILE_27B,
        ours={"ms": ms["step"], "parameters": lane.flat.size, "bytes_per_s": moved, "error": error},
        peer={"what": "copy", "ms": ms["copy"], "bytes_per_s": copied},
        ratio=share,
        ours_text=f"{moved / 1e12:.2f} TB/s",
        peer_text=f"{copied / 1e12:.2f} TB/s",
        share_text=f"{share:.2f} copy" if share is not None else "-",
        figures={"ratio": share, "copy_share": share},
    )


def optimizer_error(lane: DrafterLane) -> float:
    """Error of the change of a few masters in a first step, whose moments are the clipped gradient and its square."""
    few = slice(0, 4096)
    section = lane.parts.optim
    before, gradient = lane.optimizer.master[few].double(), lane.flat.grads[few].double()
    norm = lane.flat.grads.norm(dtype=torch.float64) / lane.total[WEIGHT]
    gradient = gradient / lane.total[WEIGHT] / (norm / section.clip).clamp(min=1.0)
    lr = rate(lane.optimizer.step_count, lane.optimizer.num_steps, section).double()
    expected = -lr * (gradient / (gradient.abs() + section.eps) + section.weight_decay * before)
    lane.measure_and_update()
    return relative_error(lane.optimizer.master[few].double() - before, expected)
