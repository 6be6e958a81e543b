"""What `plan` takes from a warm-up: times of the same graphs, and nothing from a file of another shape."""

import dataclasses
import json

import jsonschema
import pytest
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.cli import main
from draftgraph.engine.config import to_toml
from draftgraph.engine.errors import UsageError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict.measured import read_warmup
from draftgraph.engine.predict.summary import summary
from draftgraph.engine.train import warmup
from draftgraph.profiles.load import WARMUP_SCHEMA


def changed(profile, section, **keys):
    return dataclasses.replace(profile, **{section: dataclasses.replace(getattr(profile, section), **keys)})


def rows_of(plan):
    rows = [(step, bucket.name) for bucket in plan.buckets for step in ("target", "drafter")] + [("optimizer", "")]
    return [{"step": step, "bucket": name, "eager_ms": 5.0, "replay_ms": None} for step, name in rows]


def test_times_of_a_warm_up_are_taken_for_the_same_graphs_alone(tmp_path):
    profile = tiny_profile(tmp_path, capture={"mode": "eager", "warmup_rounds": 2, "verify_rounds": 1})
    evidence = warmup(profile, tmp_path / "run", Console(quiet=True))
    jsonschema.validate(evidence, json.loads(WARMUP_SCHEMA.read_text()))
    read = read_warmup(tmp_path / "run" / "warmup.json")
    same = summary(make_plan(profile), read)
    assert same["figures"] == "measured" and same["step_ms"] > 0 and same["notes"] == []
    # What decides the learning alone, or how the graphs are used, changes no graph.
    for alike in (changed(profile, "optim", lr=1e-5, accumulate=4), changed(profile, "drafter", gamma=2.0, reuse=2)):
        assert summary(make_plan(alike), read)["figures"] == "measured"
    for section, key, was, value in (
        ("drafter", "recompute", False, True),
        ("drafter", "chunk_slots", profile.drafter.chunk_slots, 2 * profile.drafter.chunk_slots),
        ("target", "forward", "auto", "module"),
    ):
        plan = make_plan(changed(profile, section, **{key: value}))
        other = summary(plan, read)
        assert other["step_ms"] is None
        assert other["notes"][0].endswith(f"not used: {section}.{key} was {was!r}, is {value!r}.")
        assert summary(plan, read, "h200")["figures"] == "estimated"
    labels = summary(make_plan(changed(profile, "drafter", labels="target")), read)
    assert "loss.labels was 'data', is 'target'" in labels["notes"][0] and labels["step_ms"] is None


def test_a_warm_up_that_does_not_say_what_it_was_of_is_taken_and_told(tmp_path):
    plan = make_plan(tiny_profile(tmp_path))
    (tmp_path / "old.json").write_text(json.dumps({"graphs": rows_of(plan), "devices": [{"name": None}]}))
    found = summary(plan, read_warmup(tmp_path / "old.json"))
    assert found["figures"] == "measured" and "does not say what its graphs were made of" in found["notes"][0]


ROW = {"step": "target", "bucket": "r1-s16-a8", "eager_ms": 1.0, "replay_ms": None}
GOOD = {"graphs": [ROW], "devices": [{"name": None}]}


@pytest.mark.parametrize(
    "content",
    [
        *([], {}, 3, "x", None, {"warmup": 3}, {"warmup": [1]}),
        *({"graphs": []}, GOOD | {"devices": []}, GOOD | {"devices": [None]}, GOOD | {"devices": {"name": 1}}),
        *(GOOD | {"devices": [{"name": 3}]}, GOOD | {"graphs": {}}, GOOD | {"graphs": [{}]}, GOOD | {"made_of": [1]}),
        *(GOOD | {"graphs": [ROW | {key: value}]} for key, value in {"eager_ms": "1", "bucket": 3, "step": []}.items()),
        *(GOOD | {"graphs": [ROW | {"replay_ms": ms}]} for ms in (0, -1.0, True, float("nan"), 10**400, [1])),
    ],
)
def test_a_file_of_another_shape_is_refused_in_one_sentence(tmp_path, capsys, content):
    (tmp_path / "cpu.toml").write_text(to_toml(tiny_profile(tmp_path)))
    (tmp_path / "warmup.json").write_text(json.dumps(content))
    assert main(["plan", str(tmp_path / "cpu.toml"), "--warmup", str(tmp_path / "warmup.json")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "cannot read" in error and "`draftgraph warmup` writes" in error and "Traceback" not in error


def test_a_cpu_beside_gpus_is_never_timed_as_one_of_them(tmp_path, capsys):
    mixed = {"targets": ["cpu"], "drafters": ["cuda:0"], "look_ahead": 1}
    plan = make_plan(tiny_profile(tmp_path, placement=mixed))
    for gpu in (None, "h200"):
        found = summary(plan, None, gpu)
        assert found["step_ms"] is None and found["recompute"]["costs_ms"] is None
        assert "what a CPU takes is measured" in found["notes"][0] and "--gpu" not in found["notes"][0]
    # Times of a warm-up of the same placement are taken; the card's memory says nothing of the CPU's.
    devices = [{"name": None}, {"name": "NVIDIA H200"}]
    evidence = {"graphs": rows_of(plan), "devices": devices, "made_of": plan.graphs_made_of}
    found = summary(plan, evidence)
    assert found["figures"] == "measured" and found["gpu"] == "h200" and found["fits"]
    assert found["arrangements"] == found["reuse"] == []
    # That of a run on GPUs alone is not.
    on_gpus = make_plan(tiny_profile(tmp_path, placement=mixed | {"targets": ["cuda:0"]}))
    other = summary(plan, evidence | {"made_of": on_gpus.graphs_made_of})
    assert other["step_ms"] is None
    assert other["notes"][0].endswith("not used: placement.targets was ['cuda'], is ['cpu'].")


def test_a_gpu_that_the_table_lacks_keeps_its_name(tmp_path):
    plan = make_plan(tiny_profile(tmp_path, placement={"targets": ["cuda:0"], "drafters": ["cuda:0"]}))
    evidence = {"graphs": rows_of(plan), "devices": [{"name": "NVIDIA X1"}], "made_of": plan.graphs_made_of}
    assert summary(plan, evidence)["gpu"] == "NVIDIA X1"


def test_a_device_has_one_name_and_one_that_is_none_is_refused(tmp_path):
    assert tiny_profile(tmp_path, placement={"targets": ["cuda"], "drafters": ["cuda:0", "cpu"], "look_ahead": 1}) == (
        tiny_profile(tmp_path, placement={"targets": ["cuda:0"], "drafters": ["cuda:0", "cpu"], "look_ahead": 1})
    )
    for name in ("gpu0", "cuda:", "cuda:-1", "cuda:01", "CPU", "cpu:0", "mps", ""):
        with pytest.raises(UsageError, match=f"names the device '{name}'; write cpu or cuda:N"):
            tiny_profile(tmp_path, placement={"targets": [name], "drafters": ["cuda:0"], "look_ahead": 1})
