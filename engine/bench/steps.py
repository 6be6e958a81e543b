"""Training steps beside SpecForge's, and target extraction alone.

The engine under measurement is the one that `draftgraph train` runs: the same warm-up, lanes, scheduler and data
process. It lives in a spawned process of its own, so that all its memory is free when the peer starts, and nothing is
warm from an earlier workload. Rows are those of the peer, the first N of the recorded lengths, in the buckets of all of
them and in the schedule's order, and a few that follow and fill the last micro-batch of a bucket; some come twice to
fill the last step.
"""

import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from draftgraph.capture.families import family
from draftgraph.capture.verify import compare, eager_references
from draftgraph.capture.watch import SteadyWatch
from draftgraph.engine.bench.peer import specforge
from draftgraph.engine.bench.protocol import ROUNDS, Bench, Clock, Result
from draftgraph.engine.bench.workloads import PROFILE_08B, PROFILE_27B, load
from draftgraph.engine.build import DTYPES, VerificationData, load_targets, resolve_device
from draftgraph.engine.config import Profile
from draftgraph.engine.data.schedule import MicroBatch
from draftgraph.engine.data.shards import Selected
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import Plan, make_plan
from draftgraph.engine.run.buffers import BatchBuffer
from draftgraph.engine.run.lanes import TargetLane
from draftgraph.engine.run.metrics import figures
from draftgraph.engine.steps import issue, schedule
from draftgraph.engine.trace import built_in_profiler
from draftgraph.engine.train import readable_errors, warm_engine
from draftgraph.profiles.kineto import read_kineto
from draftgraph.profiles.timeline import tables

BESIDE_SPECFORGE = ("w27-full", "w27-var", "w08-var")
STALL = 3.0  # a step longer than this many medians is no steady state, for the peer and for us


def w27_full(bench: Bench) -> Result:
    # Updates of 16 rows: the first starts the clock, the others are 16 micro-steps, or 8 in a quick run.
    ours_rows, peer_rows = (32 if bench.quick else 48, 32) if bench.on_gpu else (12, 8)
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder) / "full.json"
        lengths.write_text(json.dumps({"lengths": [4096] * ours_rows}))
        profile = load(bench, PROFILE_27B, (f"data.random_lengths={lengths}",))
        ours = in_own_process(bench, profile, ours_rows)
    return beside_peer(bench, profile, ours, specforge(bench, "w27-full", "27b", [2], peer_rows, full=True))


def w27_var(bench: Bench, peer_rows: list[int] | None) -> Result:
    return variable(bench, "w27-var", "27b", PROFILE_27B, peer_rows or [2])


def w08_var(bench: Bench, peer_rows: list[int] | None) -> Result:
    return variable(bench, "w08-var", "0.8b", PROFILE_08B, peer_rows or [1, 2, 4, 8])


def variable(bench: Bench, workload: str, shapes: str, name: str, peer_rows: list[int]) -> Result:
    total = (128 if bench.quick else 256) if bench.on_gpu else 16
    profile = load(bench, name)
    ours = in_own_process(bench, profile, total)
    return beside_peer(bench, profile, ours, specforge(bench, workload, shapes, peer_rows, total))


def beside_peer(bench: Bench, profile: Profile, ours: dict[str, Any], measured: dict[int, dict[str, Any]]) -> Result:
    """Ours against the peer's best number of rows, in steady state and inclusive."""
    steady, inclusive = "real_tokens_per_s_steady", "real_tokens_per_s_inclusive"

    def over(figure: str) -> float | None:
        return ours[figure] / max(line[figure] for line in measured.values()) if measured else None

    floor, ceiling = None, bench.target_ceiling(profile)
    if ceiling and bench.ceiling_tflops:
        target_flops = ours["target_flops_per_token"]
        drafter_flops = ours["flops_per_token"] - target_flops
        floor = 1e12 / (target_flops / ceiling + drafter_flops / bench.ceiling_tflops)
    ours["floor_tokens_per_s"] = floor
    share = ours[steady] / floor if floor else None
    best = max((line[steady] for line in measured.values()), default=None)
    # Compilers' caches are as the earlier measurement left them, which is ours, not the peer's, to gain.
    known = any("date" in line for line in measured.values())
    return Result(
        profile=dataclasses.asdict(profile),
        ours=ours,
        peer={str(rows): line for rows, line in measured.items()} or None,
        ratio=over(steady),
        ours_text=f"{ours[steady]:,.0f} tok/s",
        peer_text=f"{best:,.0f} tok/s" if best is not None else "-",
        share_text=f"{share:.2f} floor" if share is not None else "-",
        figures={
            "ratio": over(steady),
            "ratio_inclusive": None if known else over(inclusive),
            "ratio_one_row": ours[steady] / measured[1][steady] if 1 in measured else None,
            "floor_share": share,
        },
    )


def in_own_process(bench: Bench, profile: Profile, num_rows: int) -> dict[str, Any]:
    bench.say(f"ours: {profile.target.model}, {num_rows} rows")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(train_rows, profile, num_rows).result()
        except BrokenProcessPool as error:
            raise RunError("bench: the measured process was ended, by lack of host memory or by a signal") from error
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def train_rows(profile: Profile, num_rows: int) -> dict[str, Any]:
    """Warm up, train on the first `num_rows` rows, and what that took; real tokens are those before padding."""
    assert profile.drafter.reuse == 1
    console = Console(stderr=True)
    plan = first_rows(make_plan(profile), num_rows)
    with tempfile.TemporaryDirectory() as folder, warm_engine(plan, Path(folder), console) as (engine, evidence):
        steps = dealt(engine.schedule.at(0), profile.optim.accumulate, num_rows)
        drafter = engine.rig.drafters[0]
        watch = SteadyWatch(engine.devices if profile.capture.mode == "graph" else [])
        started = time.perf_counter()
        with engine.loader(0) as (loader, rig):
            scheduler, late = schedule(plan, rig, loader, 0)
            clock = Clock(drafter.device, drafter.lane.stream, len(steps) + 1)
            watch.open(0)
            clock.mark()
            issuing = -time.thread_time()
            with watch.steady():
                for number in range(1, len(steps) + 1):
                    issue(scheduler, late, number)
                    late.finished()
                    clock.mark()
                    watch.mark(number)
            issuing += time.thread_time()
            scheduler.drain()
            seconds = time.perf_counter() - started
            watch.close()
            tokens = [sum(int(plan.lengths[b.row_ids].sum()) for b in step) for step in steps]
            assert sum(tokens) == scheduler.real_tokens
            last = figures(len(steps), drafter.published.tolist(), plan.shape.block_size)
            # One more step, recorded: where its time goes.
            trace = Path(folder) / "step.json.gz"
            with built_in_profiler(trace, drafter.device.type == "cuda"):
                issue(scheduler, late, len(steps) + 1)
                late.finished()
                scheduler.drain()
        batches = [batch for step in steps for batch in step]
        # The first step's time holds the start of the data process: it only starts the clock.
        times = list(zip(clock.seconds(), tokens, strict=True))[1:]
        typical = median(t for t, _ in times)
        steady = [(t, n) for t, n in times if t <= STALL * typical]
        verification = evidence["seconds_by_phase"]["verification"]
        num_processed = sum(plan.buckets[b.bucket_index].rows * plan.buckets[b.bucket_index].context for b in batches)
        num_trained = sum(len(b.row_ids) for b in batches)
        inclusive = evidence["seconds"] + seconds
        return {
            "real_tokens_per_s_steady": sum(n for _, n in steady) / sum(t for t, _ in steady),
            # From models built to the last row: tuning, capture and verification counted, or all but verification.
            "real_tokens_per_s_inclusive": sum(tokens) / inclusive,
            "real_tokens_per_s_inclusive_without_verification": sum(tokens) / (inclusive - verification),
            "rows": num_trained,
            "tokens_per_row": sum(tokens) / num_trained,
            "tokens_per_row_of_the_peer": float(plan.lengths[:num_rows].mean()),
            "row_efficiency": plan.schedule.row_efficiency,
            "steps": len(steps),
            "micro_steps_per_step": profile.optim.accumulate,
            "stalled_steps": len(times) - len(steady),
            "step_s_median": typical,
            "step_s_max": max(t for t, _ in times),
            "padding_efficiency": sum(tokens) / num_processed,
            "flops_per_token": sum(floor_flops(plan, b.row_ids) for b in batches) / sum(tokens),
            "target_flops_per_token": float(plan.flops.target(1)),
            "tap_errors": evidence["tap_errors"],
            "warmup_seconds": evidence["seconds"],
            "tuning_seconds": evidence["seconds_by_phase"]["tuning"],
            "compilations": evidence["compilations"],
            "capture_seconds": evidence["seconds_by_phase"]["capture"],
            "verification_seconds": verification,
            "scheduler_busy": issuing / seconds if profile.capture.mode == "graph" else None,
            "host_syncs_per_step": None if watch.host_syncs is None else watch.host_syncs / len(steps),
            "steady_state": "; ".join(watch.findings) or "as warm-up left it",
            **watch.memory.report(len(steps)),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
            "loss": last.loss,
            "kernel_families": tables(read_kineto(trace), family)["families"],
            "graphs": [
                {key: row[key] for key in ("step", "bucket", "eager_ms", "replay_ms", "pool_bytes")}
                for row in evidence["graphs"]
            ],
        }


def first_rows(plan: Plan, num_rows: int) -> Plan:
    """The plan with only the first rows of its data, and of each of their buckets the next ones that fill it.

    Without these, slots of nearly every bucket would stay without a row, of which a whole epoch has next to none.
    """
    chosen = [np.arange(num_rows)]
    for index, count in enumerate(np.bincount(plan.assignment[:num_rows])):
        following = num_rows + np.flatnonzero(plan.assignment[num_rows:] == index)
        chosen.append(following[: -count % plan.buckets[index].rows])
    row_ids = np.concatenate(chosen)
    used, assignment = np.unique(plan.assignment[row_ids], return_inverse=True)
    return dataclasses.replace(
        plan,
        rows=Selected(plan.rows, row_ids),
        lengths=plan.lengths[row_ids],
        anchors=plan.anchors[row_ids],
        buckets=[plan.buckets[index] for index in used],
        assignment=assignment,
    )


def dealt(stream: Any, accumulate: int, num_rows: int) -> list[list[MicroBatch]]:
    """The micro-batches of the steps that hold the first `num_rows` rows; two steps at least, for one to be timed."""
    steps: list[list[MicroBatch]] = []
    while len(steps) < 2 or sum(len(batch.row_ids) for step in steps for batch in step) < num_rows:
        steps.append(list(itertools.islice(stream, accumulate)))
    return steps


def floor_flops(plan: Plan, row_ids: np.ndarray) -> float:
    """GEMM FLOPs that these rows need without any padding; attention aside.

    Source: the plan's model, less the gradient to fc's input, which nobody needs.
    """
    lengths = plan.lengths[row_ids]
    fc = plan.taps_size * plan.shape.hidden_size
    return float((plan.flops.row(lengths, plan.anchors[row_ids]) - 2.0 * fc * lengths).sum())


def target(bench: Bench) -> Result:
    """Every bucket captured, verified against eager, and replayed in turn."""
    profile = load(bench, PROFILE_27B)
    plan = make_plan(profile)
    buckets = sorted(plan.buckets, key=lambda bucket: -bucket.rows * bucket.context)[: 1 if bench.quick else None]
    device, dtype = resolve_device(profile.placement.targets[0]), DTYPES[profile.target.dtype]
    bench.say(f"target: loading {profile.target.model}")
    with readable_errors(plan):
        extractor = load_targets(plan, [device], max(bucket.context for bucket in buckets))[device]
        layouts = {bucket: plan.layouts[bucket] for bucket in buckets}
        batch = BatchBuffer(layouts, plan.taps_size, dtype, device)
        lane = TargetLane("target 0", extractor, batch, profile.capture.mode, VerificationData(plan).fill).lane
        bench.say(f"target: warm-up, capture and verification of {len(buckets)} buckets")
        lane.warm_up(profile.capture.warmup_rounds)
        references = eager_references([lane], profile.capture.verify_rounds)
        lane.capture()
        compare([lane], references)
        bench.say("target: timing")
        # The comparison timed some replays already, buckets interleaved.
        for number in range(ROUNDS - min(len(lane.timings(step)[1]) for step in lane.steps)):
            for offset in range(len(lane.steps)):
                step = lane.steps[(number + offset) % len(lane.steps)]
                lane.fill(step, number)
                lane.replay_timed(step)
        rows = {row.bucket: row for row in lane.evidence}
        lane.close()
    per_bucket, ceiling = {}, bench.target_ceiling(profile)
    for bucket in buckets:
        row = rows[bucket.name]
        num_tokens = bucket.rows * bucket.context
        ms = row.replay_ms if row.replay_ms is not None else row.eager_ms
        assert ms is not None
        per_bucket[bucket.name] = {
            "ms": ms,
            "tokens_per_s": num_tokens / ms * 1e3,
            "ceiling_share": plan.flops.target(num_tokens) / ms / 1e9 / ceiling if ceiling else None,
            "eager_ms": row.eager_ms,
            "captured": row.replay_ms is not None,
        }
    # The goal is for buckets that fill the GPU.
    wide = [b for b in buckets if b.rows * b.context >= 8192] if bench.on_gpu else buckets
    shares = [per_bucket[b.name]["ceiling_share"] for b in wide]
    share = min((s for s in shares if s is not None), default=None)
    largest = per_bucket[buckets[0].name]
    return Result(
        profile=dataclasses.asdict(profile),
        ours={
            "buckets": per_bucket,
            "parameters": plan.flops.target_parameters,
            "tap_errors": extractor.tap_errors or None,
        },
        peer=None,
        ratio=None,
        ours_text=f"{largest['ms']:.1f} ms",
        peer_text="-",
        share_text=f"{share:.2f} ceiling" if share is not None else "-",
        figures={"ceiling_share": share},
    )
