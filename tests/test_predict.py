"""What `plan` predicts: the scheduler over devices that only keep time, costs, every arrangement."""

import dataclasses
import io
import json
import time
import xml.etree.ElementTree as ET
from itertools import islice
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny import ordinary_rows, tiny_profile

from draftgraph.engine.build import build
from draftgraph.engine.cli import main
from draftgraph.engine.config import EvalSection, PlacementSection, load_profile, to_toml
from draftgraph.engine.errors import UsageError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict.arrange import arrangement, placements
from draftgraph.engine.predict.cards import CARDS, card_named, card_of
from draftgraph.engine.predict.costs import Costs, costs
from draftgraph.engine.predict.memory import cache_bytes, device_bytes, per_device
from draftgraph.engine.predict.pace import Pace
from draftgraph.engine.predict.recompute import estimate
from draftgraph.engine.predict.show import show_plan
from draftgraph.engine.predict.simulate import simulate
from draftgraph.engine.run.decoding import slots_for
from draftgraph.engine.run.metrics import StepFigures
from draftgraph.engine.run.simulated import Clock, SimulatedDevice, WallClock

PAIR = PlacementSection(["cuda:0"], ["cuda:0"], look_ahead=1)


def plan_of(tmp_path, **changes):
    changes.setdefault("placement", {"targets": ["cuda:0"], "drafters": ["cuda:1"], "look_ahead": 2})
    return make_plan(tiny_profile(tmp_path, optim={"accumulate": 6}, **changes))


def costs_of(plan, target_ms, drafter_ms, optimizer_ms=0.0, card=None):
    """Every bucket takes the same; without a card copies are free."""
    buckets = plan.buckets
    return Costs(
        plan, card, dict.fromkeys(buckets, target_ms), dict.fromkeys(buckets, drafter_ms), optimizer_ms, frozenset()
    )


def split(targets, drafters, look_ahead=2):
    names = [f"cuda:{i}" for i in range(targets + drafters)]
    return PlacementSection(names[:targets], names[targets:], look_ahead)


@pytest.mark.parametrize(
    ("placement", "target_ms", "drafter_ms", "step_ms"),
    [
        (split(1, 1), 100.0, 40.0, 600.0),  # six extractions, one after the other; the drafter waits
        (split(1, 1), 40.0, 100.0, 600.0),
        (split(2, 1), 100.0, 40.0, 300.0),
        (split(1, 2), 40.0, 100.0, 300.0),
        (split(3, 3), 80.0, 100.0, 200.0),
        (PAIR, 60.0, 40.0, 600.0),  # on one device each takes its own time
        (PlacementSection(["cuda:0"], ["cuda:0"], 0), 60.0, 40.0, 600.0),
        (PlacementSection(["cpu"], ["cpu"], 0), 60.0, 40.0, 600.0),
    ],
)
def test_a_step_takes_what_the_busiest_device_takes(tmp_path, placement, target_ms, drafter_ms, step_ms):
    outcome = simulate(costs_of(plan_of(tmp_path), target_ms, drafter_ms), placement)
    assert outcome.step_ms == pytest.approx(step_ms, rel=0.01)
    assert max(outcome.busy.values()) == pytest.approx(1.0, abs=0.02)


def test_an_update_and_its_reduction_lengthen_the_step(tmp_path):
    plan = plan_of(tmp_path)
    one = simulate(costs_of(plan, 10.0, 100.0, optimizer_ms=30.0), split(1, 1))
    assert one.step_ms == pytest.approx(630.0, rel=0.01) and one.lanes["drafter 0"]["reduction"] == 0
    three = simulate(costs_of(plan, 10.0, 100.0, optimizer_ms=30.0), split(1, 3))
    assert three.step_ms == pytest.approx(210.0, rel=0.01)  # each updates a third


def test_repeats_of_an_extraction_need_fewer_extractions(tmp_path):
    outcome = simulate(costs_of(plan_of(tmp_path), 100.0, 40.0), split(1, 1), reuse=3)
    assert outcome.step_ms == pytest.approx(240.0, rel=0.02) and outcome.bound_by == "drafter"


def test_idleness_has_its_reason(tmp_path):
    outcome = simulate(costs_of(plan_of(tmp_path), 100.0, 40.0), split(1, 1))
    assert outcome.bound_by == "target"
    assert outcome.lanes["drafter 0"]["work"] == pytest.approx(0.4, abs=0.03)
    assert outcome.lanes["drafter 0"]["hand-off"] == pytest.approx(0.6, abs=0.03)
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in outcome.lanes.values())


def test_several_hosts_sum_over_the_network(tmp_path):
    plan = plan_of(tmp_path, rows=ordinary_rows(800))
    ours = costs_of(plan, 10.0, 100.0)
    alone, two = simulate(ours, split(1, 1)), simulate(ours, split(1, 1), hosts=2)
    across = ours.across_ms(1, 2)
    assert two.step_ms == pytest.approx(alone.step_ms / 2 + across, rel=0.01)
    assert two.tokens_per_s > 1.9 * alone.tokens_per_s


def test_work_fills_the_gaps_that_earlier_work_leaves():
    device = SimulatedDevice("cuda:0", Clock())
    assert device.claim(0.0, 10.0) == (0.0, 10.0)
    assert device.claim(20.0, 10.0) == (20.0, 30.0)
    assert device.claim(5.0, 15.0) == (10.0, 35.0)
    assert device.busy == [(0.0, 35.0)] and device.busy_until(15.0) == pytest.approx(15.0)


def test_the_scheduler_reaches_its_simulation_on_eight_devices_and_leaves_the_core_free(tmp_path):
    """A rehearsal: the wall's clock, 5 targets and 3 drafters whose replays sleep."""
    plan = plan_of(tmp_path, placement={"targets": ["cuda:0"], "drafters": ["cuda:1"], "look_ahead": 2})
    ours = costs_of(plan, 400.0, 240.0, optimizer_ms=6.0)
    predicted = simulate(ours, split(5, 3), num_steps=10)
    since, cpu_since = time.perf_counter(), time.thread_time()
    rehearsed = simulate(ours, split(5, 3), num_steps=10, clock=WallClock())
    wall, cpu = time.perf_counter() - since, time.thread_time() - cpu_since
    assert predicted.step_ms / rehearsed.step_ms >= 0.97
    assert cpu / wall < 0.10
    assert wall > 9 * predicted.step_ms / 1e3  # it did take the time


def test_measured_times_replace_estimates_and_scale_the_others(tmp_path):
    plan = plan_of(tmp_path)
    first, *others = plan.buckets
    row = {"bucket": first.name, "eager_ms": 9.0}
    evidence = {
        "devices": [{"name": "NVIDIA H200"}],
        "graphs": [
            {**row, "step": "target", "replay_ms": 8.0},
            {**row, "step": "drafter", "replay_ms": None},
            {"step": "optimizer", "bucket": "", "eager_ms": None, "replay_ms": 0.5},
            {"step": "optimizer", "bucket": "", "eager_ms": None, "replay_ms": 0.5},
        ],
    }
    found = costs(plan, evidence, None)
    assert found.card == CARDS["h200"] and found.optimizer_ms == 1.0  # of two, each of which has half
    assert found.target_ms[first] == 8.0 and found.drafter_ms[first] == 9.0
    for bucket in others:
        ratio = plan.flops.target(bucket.rows * bucket.context) / plan.flops.target(first.rows * first.context)
        assert found.target_ms[bucket] == pytest.approx(8.0 * ratio)
        assert f"target {bucket.name}" not in found.measured
    other_card = costs(plan, evidence, "b200")
    assert not other_card.measured and other_card.target_ms[first] != 8.0


def test_a_runs_pace_leaves_out_what_it_spent_away_from_its_steps(monkeypatch):
    now, pace = iter([10.0, 25.0]), Pace()
    monkeypatch.setattr("draftgraph.engine.predict.pace.time", SimpleNamespace(perf_counter=lambda: next(now)))
    for step, away in ((2, 1.0), (7, 11.0)):
        pace.look([StepFigures(step, 3.0, None, [], None, None, 0.0, 0)], away)
    assert pace.step_ms == 1000.0


@pytest.mark.parametrize(("first", "last"), [(1, 4), (2, 5), (9, 11)])
def test_a_runs_pace_is_predicted_for_the_very_steps_that_were_timed(tmp_path, first, last):
    plan = plan_of(tmp_path, placement={"targets": ["cuda:0"], "drafters": ["cuda:0"]})
    ms = {bucket.name: 10.0 * 4**i for i, bucket in enumerate(plan.buckets)}
    graphs = [(step, name, value) for step in ("target", "drafter") for name, value in ms.items()]
    rows = [
        {"step": step, "bucket": name, "eager_ms": None, "replay_ms": value}
        for step, name, value in [*graphs, ("optimizer", "", 0.5)]
    ]
    batches = islice(plan.schedule.at(first * plan.accumulate), (last - first) * plan.accumulate)
    work = sum(2 * ms[plan.buckets[batch.bucket_index].name] for batch in batches)
    pace = Pace()
    pace.first, pace.last = (first, 10.0), (last, 20.0)
    found = pace.figures(plan, {"devices": [{"name": "NVIDIA H200"}], "graphs": rows})
    assert found["predicted_step_ms"] == pytest.approx(work / (last - first) + 0.5, rel=2e-3)


def test_cards_are_found_by_their_product_names():
    assert card_named("NVIDIA H200") == CARDS["h200"]
    assert card_named("NVIDIA A100-SXM4-80GB") == CARDS["a100-80gb"]
    assert card_named("NVIDIA H100 PCIe") == CARDS["h100-pcie"]
    assert card_named("NVIDIA GeForce RTX 4090") == CARDS["rtx-4090"]
    assert card_named("Some other") is None and card_named(None) is None
    with pytest.raises(UsageError, match="did you mean h200"):
        card_of("h2000")


def test_targets_on_one_device_share_its_model(tmp_path):
    plan = plan_of(tmp_path)
    once = device_bytes(plan, PlacementSection(["cuda:0"], ["cuda:1"], 1))
    twice = device_bytes(plan, PlacementSection(["cuda:0", "cuda:0"], ["cuda:1"], 1))
    assert twice["target 1 on cuda:0"]["weights"] == 0
    assert per_device(twice)["cuda:0"] < 2 * per_device(once)["cuda:0"]
    three = device_bytes(plan, split(1, 3))
    assert three["drafter 0 on cuda:1"]["states"] == once["drafter 0 on cuda:1"]["states"] // 3


def test_a_target_in_fp8_is_predicted_faster_where_the_card_has_it(tmp_path):
    own, fp8 = (
        make_plan(load_profile("qwen3.6-27b-8gpu", [f"target.precision={precision}"])) for precision in ("own", "fp8")
    )
    slow, fast = (costs(plan, None, "h200") for plan in (own, fp8))
    assert fast.drafter_ms == slow.drafter_ms
    assert all(slow.target_ms[b] == pytest.approx(1.66 * fast.target_ms[b]) for b in own.buckets)
    with pytest.raises(UsageError, match="a100-80gb has no products in FP8"):
        costs(fp8, None, "a100-80gb")


def test_recomputing_layers_is_predicted_to_take_longer(tmp_path):
    plain, again = (
        make_plan(load_profile("qwen3.6-27b-8gpu", [f"drafter.recompute={switch}"])) for switch in ("false", "true")
    )
    bucket, told = (
        max(plain.buckets, key=lambda b: (b.rows * b.anchors, b.rows * b.context)),
        estimate(plain, CARDS["h200"]),
    )
    assert told["bucket"] == bucket.name
    before, after = (costs(plan, None, "h200").drafter_ms[bucket] for plan in (plain, again))
    assert after - before == pytest.approx(told["costs_ms"])


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_evaluations_during_a_run_take_the_predicted_caches(tmp_path, family):
    profile = tiny_profile(tmp_path, family, eval={"every": 2, "count": 3, "new_tokens": 12})
    plan = make_plan(profile)
    decoder = build(plan).held_out.decoder
    slots = len(decoder.target.slots)
    found = sum(t.nbytes for t in decoder.target.tensors.values())
    assert cache_bytes(plan.target_config, slots, 4) * 3 == found
    caches = found + sum(t.nbytes for t in decoder.drafter.tensors.values())
    predicted = device_bytes(plan)["target 0 on cpu"]["evaluation"]
    longest = slots_for(max(b.context for b in plan.buckets), 12, plan.shape.block_size)
    logits = 3 * 2 * plan.shape.block_size * plan.shape.vocab_size * 4
    assert caches + logits <= predicted <= caches * longest / slots + logits
    without = make_plan(dataclasses.replace(profile, eval=EvalSection()))
    assert device_bytes(without)["target 0 on cpu"]["evaluation"] == 0


def test_what_does_not_fit_is_said(tmp_path):
    plan = make_plan(load_profile("qwen3.6-27b-8gpu"))
    small, large = costs(plan, None, "a100-40gb"), costs(plan, None, "h200")
    assert arrangement(small, split(5, 3), 1).fits is False
    found = [arrangement(large, placement, 1) for placement in placements(8)]
    assert all(a.fits for a in found) and len(found) == 8 and all(a.devices == 8 for a in found)
    pairs = found[0]
    # Nothing can beat eight devices that are always busy.
    assert pairs.name == "8 pairs" and min(pairs.outcome.busy.values()) > 0.97
    assert pairs.outcome.tokens_per_s == max(a.outcome.tokens_per_s for a in found)


def test_the_profile_of_eight_gpus_is_planned_with_a_picture(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    assert main(["plan", "qwen3.6-27b-8gpu", "--timeline", str(picture), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["split"] == {"targets": 5, "drafters": 3} and summary["figures"] == "estimated"
    assert summary["fits"] and summary["tokens_per_s"] > 0 and summary["gpu"] == "h200"
    assert summary["recompute"]["at_tflops"] == CARDS["h200"].flops() / 1e12
    assert [row["devices"] for row in summary["best"]] == [2, 4, 8, 16, 64]
    assert [row["reuse"] for row in summary["reuse"]] == [1, 2, 4]
    # Tokens/s count an extraction once: it is the milliseconds of a micro-step that compare reuses.
    assert summary["reuse"][0]["micro_step_ms"] > summary["reuse"][1]["micro_step_ms"]
    assert summary["reuse"][0]["tokens_per_s"] > summary["reuse"][1]["tokens_per_s"]
    texts = {node.text for node in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {f"target {t}" for t in range(5)} | {f"drafter {d}" for d in range(3)} <= texts
    narrow = Console(file=io.StringIO(), width=80)
    show_plan(narrow, summary)
    shown = narrow.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for row in [row for row in summary["arrangements"] if row["devices"] == 8] + summary["best"] + summary["reuse"]:
        assert f" {row['tokens_per_s']:,.0f} " in shown


def test_a_cpu_without_a_warm_up_predicts_no_time(tmp_path, capsys):
    profile = tiny_profile(tmp_path)
    assert costs(make_plan(profile), None, None) is None
    (tmp_path / "cpu.toml").write_text(to_toml(profile))
    assert main(["plan", str(tmp_path / "cpu.toml"), "--timeline", str(tmp_path / "plan.svg")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--timeline needs times" in error and "capture.warmup_rounds = 2 or more" in error and "a --gpu." in error
    (tmp_path / "torn.json").write_text("{}")
    assert main(["plan", str(tmp_path / "cpu.toml"), "--warmup", str(tmp_path / "torn.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
