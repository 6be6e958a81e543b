"""`draftgraph bench`: named workloads, a receipt each, and one table beside peers, floors and goals."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftgraph.engine.bench import kernels, observers, overlap, steps
from draftgraph.engine.bench.goals import FP8_GOALS, GOALS, Goal
from draftgraph.engine.bench.peer import earlier
from draftgraph.engine.bench.protocol import Bench, Result
from draftgraph.engine.show import bytes_text, columns_table
from draftgraph.profiles.measure import receipt, write_receipt


def bench(
    workloads: list[str],
    out: Path,
    quick: bool,
    peer_rows: list[int] | None,
    peer_from: Path | None,
    assignments: list[str],
    console: Console,
) -> dict[str, Any]:
    """Measure the workloads in the order given; the summary of `draftgraph bench`.

    Args:
        out: folder of the receipts, bench-WORKLOAD.json, or bench-WORKLOAD-fp8.json with a target in FP8.
        quick: fewer rows and cases; a receipt says so.
        peer_rows: rows of the peer's micro-steps in w27-var and w08-var.
        peer_from: folder of receipts of the same GPU and versions, whose peers are not measured again.
        assignments: section.key=value, over the workloads' profiles.
    """
    out.mkdir(parents=True, exist_ok=True)  # before minutes are spent on what could not be written
    run: dict[str, Callable[[Bench], Result]] = {
        "w27-full": steps.w27_full,
        "w27-var": functools.partial(steps.w27_var, peer_rows=peer_rows),
        "w08-var": functools.partial(steps.w08_var, peer_rows=peer_rows),
        "target": steps.target,
        "overlap": overlap.overlap,
        "attention": kernels.attention,
        "cross-entropy": kernels.cross_entropy,
        "optimizer": kernels.optimizer,
        "observers": observers.observers,
    }
    started = time.perf_counter()
    if not torch.cuda.is_available():
        console.print("[bold]There is no GPU here: tiny shapes, which test the commands. These are no measurements.[/]")
    beside = [name for name in workloads if name in steps.BESIDE_SPECFORGE]
    known = earlier(peer_from, beside, quick) if peer_from else {}
    handed = Bench(console, quick, assignments, known)
    results, table, notes = {}, [], []
    for name in dict.fromkeys(workloads):
        result = run[name](handed)
        if not handed.on_gpu:  # nothing was measured, so nothing is compared
            result = dataclasses.replace(result, ratio=None, figures={})
        fp8 = isinstance(result.profile, dict) and result.profile["target"]["precision"] == "fp8"
        wanted = (FP8_GOALS if fp8 else GOALS)[name]
        goals = {goal.figure: {"bound": goal.bound, "met": goal.met(result.figures)} for goal in wanted}
        content = receipt(
            name,
            result.profile,
            ours=result.ours,
            peer=result.peer,
            ratio=result.ratio,
            ceiling_tflops=handed.ceiling_tflops,
        )
        shown = {"ours": result.ours_text, "peer": result.peer_text, "share": result.share_text}
        extra = {
            "shown": shown,
            "figures": result.figures,
            "goals": goals,
            "quick": quick,
            **handed.ceilings,
            "fp8_ceiling_tflops": handed.fp8_ceiling_tflops if fp8 else None,
        }
        path = out / f"bench-{name}{'-fp8' if fp8 else ''}.json"
        write_receipt(path, content | extra)
        results[name] = {"receipt": str(path), "ratio": result.ratio, "figures": result.figures, "goals": goals}
        table.append({"workload": name, **shown, "ratio": number(result.ratio)})
        notes += [f"{name}: {goal_text(goal, result.figures)}" for goal in wanted]
        del result
        handed.free()
    handed.say("done")
    where = f"{handed.ceiling_tflops:,.0f} TFLOP/s bf16 ceiling" if handed.ceiling_tflops else "no measurements: no GPU"
    console.print(columns_table(f"Bench, {where}", table))
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return {
        "out": str(out),
        "workloads": results,
        "ceiling_tflops": handed.ceiling_tflops,
        "seconds": time.perf_counter() - started,
    }


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def goal_text(goal: Goal, figures: dict[str, float | None]) -> str:
    """Such as "ratio 1.62, goal >= 1.50: met"."""
    value = figures.get(goal.figure)
    write = bytes_text if goal.figure.endswith("_bytes") else number
    sign = "<=" if goal.at_most else ">="
    ending = {True: "met", False: "missed", None: "not measured"}[goal.met(figures)]
    found = "-" if value is None else write(value)
    return f"{goal.figure} {found}, goal {sign} {write(goal.bound)}: {ending}"
