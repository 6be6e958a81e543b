"""Run folders: what goes on, what is refused, what a damaged or missing checkpoint means."""

import io
import json
import re
import shutil
import tomllib

import pytest
import tomli_w
import torch
from rich.console import Console
from test_engine_run import assert_same_bits, masters, run
from tiny import ordinary_rows, tiny_profile

from draftgraph.engine.config import to_toml
from draftgraph.engine.errors import RunError
from draftgraph.engine.plan import make_plan
from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.optimizer import rate
from draftgraph.engine.run_folder import locked
from draftgraph.engine.train import train


def test_a_run_folder_is_neither_overwritten_nor_resumed_by_accident(tmp_path):
    profile = tiny_profile(tmp_path)
    with pytest.raises(RunError, match=r"there is no checkpoint in .* yet; start without --resume"):
        run(profile, tmp_path / "run", resume=True)
    run(profile, tmp_path / "run")
    with pytest.raises(RunError, match="already holds a run"):
        run(profile, tmp_path / "run")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    profile = tiny_profile(tmp_path)
    run(profile, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000006" / "state.safetensors").write_bytes(b"torn")
    assert checkpoint.newest(folder).name == "step-000003"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"run": {"seed": 4}}, "made with run.seed = 3 (the profile gives 4)"),
        ({"drafter": {"layers": 3}}, "drafter.layers = 2 (the profile gives 3)"),
        ({"drafter": {"gamma": 3.0}}, "drafter.gamma = 2.0 (the profile gives 3.0)"),
        ({"drafter": {"anchors": 7}}, "drafter.anchors = 8 (the profile gives 7)"),
        ({"optim": {"weight_decay": 0.5}}, "optim.weight_decay = 0.0 (the profile gives 0.5)"),
        ({"rows": ordinary_rows(30)}, "data = "),
        ({"family": "qwen3"}, "target.model = "),
    ],
)
def test_a_resume_as_another_run_is_refused_by_field_and_changes_nothing(tmp_path, changes, field):
    run(tiny_profile(tmp_path), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = tiny_profile(tmp_path, **changes)
    with pytest.raises(RunError, match=f"was .*{re.escape(field)}"):
        run(other, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    profile = tiny_profile(tmp_path)
    real = checkpoint.save_file

    def full(tensors, path):
        if "000006" in str(path):
            raise SafetensorError("I/O error: No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match="No space left"):
        run(profile, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


def test_a_resume_from_an_earlier_checkpoint_drops_the_damaged_later_one(tmp_path):
    profile = tiny_profile(tmp_path, checkpoint={"every": 1, "keep": 2})
    run(profile, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in checkpoint.found(folder)] == ["step-000005", "step-000006"]
    (folder / "step-000006" / "state.safetensors").write_bytes(b"torn")
    assert run(profile, tmp_path / "run", resume=True)["first_step"] == 5
    assert checkpoint.newest(folder).name == "step-000006"


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_and_a_torn_line_is_dropped(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert run(tiny_profile(tmp_path), tmp_path / "run")["steps"] == 6
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("content", ["[]", '"x"', "{}", '{"step": "6", "micro_step": 12, "updates": 6, "skipped": 0}'])
def test_a_checkpoint_whose_counts_are_no_counts_is_passed_over(tmp_path, content):
    run(tiny_profile(tmp_path), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000006" / "state.json").write_text(content)
    assert checkpoint.newest(folder).name == "step-000003"


def test_a_complete_run_is_not_resumed_and_keeps_its_receipt(tmp_path):
    run(tiny_profile(tmp_path), tmp_path / "run")
    receipt = (tmp_path / "run" / "receipt.json").read_bytes()
    with pytest.raises(RunError, match="is complete"):
        run(tiny_profile(tmp_path), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "receipt.json").read_bytes() == receipt


def test_a_complete_run_goes_on_for_more_steps_at_the_rate_of_a_longer_run(tmp_path):
    profile = tiny_profile(tmp_path)
    run(profile, tmp_path / "run")
    longer = tiny_profile(tmp_path, run={"steps": 9})
    said = Console(record=True, width=400, file=io.StringIO())
    summary = train(longer, tmp_path / "run", True, said)
    assert (summary["first_step"], summary["steps"]) == (6, 9)
    assert "run.steps is 9, was 6 at step-000006: from here on not the bits" in said.export_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    wanted = [float(rate(torch.tensor(float(i)), torch.tensor(9.0), longer.optim)) for i in range(6, 9)]
    assert [line["lr"] for line in lines[6:]] == pytest.approx(wanted)


def test_a_second_process_in_one_run_folder_is_refused(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(RunError, match="another process is training"):
        run(tiny_profile(tmp_path), tmp_path / "run")


@pytest.mark.parametrize("mine", ["# mine", '[data]\nshards = "s"\n', "# {}", "[run]\nstep = 1\n"])
def test_a_users_own_profile_is_never_overwritten(tmp_path, mine):
    mine = mine.replace("{}", "mine\n" + to_toml(tiny_profile(tmp_path)))
    (tmp_path / "profile.toml").write_text(mine)
    with pytest.raises(RunError, match="not a run's"):
        run(tiny_profile(tmp_path), tmp_path)
    assert (tmp_path / "profile.toml").read_text() == mine


def test_a_run_of_an_older_version_goes_on_with_defaults_for_the_keys_that_it_lacks(tmp_path):
    profile = tiny_profile(tmp_path)
    run(profile, tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "older")
    checkpoint.remove(folder / "checkpoints" / "step-000006")
    older = {section: dict(keys) for section, keys in tomllib.loads((folder / "profile.toml").read_text()).items()}
    del older["eval"]
    for section, key in (("target", "precision"), ("drafter", "labels"), ("optim", "on_not_finite"), ("log", "wandb")):
        del older[section][key]
    (folder / "profile.toml").write_text(tomli_w.dumps(older))
    path = folder / "checkpoints" / "step-000003"
    scalars = json.loads((path / "state.json").read_text())
    del scalars["rate_share"]
    for name in checkpoint.UNSAID:
        section, _, key = name.partition(".")
        del scalars[section][key]
    (path / "state.json").write_text(json.dumps(scalars))
    manifest = json.loads((path / "manifest.json").read_text())
    sealed = {"bytes": (path / "state.json").stat().st_size, "sha256": checkpoint.digest(path / "state.json")}
    manifest["files"]["state.json"] = sealed
    (path / "manifest.json").write_text(json.dumps(manifest))
    said = Console(record=True, width=400, file=io.StringIO())
    assert train(profile, folder, True, said)["first_step"] == 3
    assert "not the bits" not in said.export_text()
    assert_same_bits(masters(tmp_path / "whole", 6), masters(folder, 6))
    assert (folder / "profile.toml").read_text() == (tmp_path / "whole" / "profile.toml").read_text()


def test_a_resume_with_other_drafters_says_that_it_is_not_bitwise(tmp_path):
    run(tiny_profile(tmp_path, checkpoint={"every": 3}), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    two = tiny_profile(tmp_path, placement={"drafters": ["cpu", "cpu"], "look_ahead": 1})
    said = Console(record=True, width=400, file=io.StringIO())
    train(two, tmp_path / "run", True, said)
    assert "placement.drafters is 2, was 1 at step-000003: from here on not the bits" in said.export_text()


def test_a_resume_with_another_bucket_table_goes_on_and_says_that_it_is_not_bitwise(tmp_path):
    run(tiny_profile(tmp_path), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
    fewer = tiny_profile(tmp_path, buckets={"count": 1})
    said = Console(record=True, width=400, file=io.StringIO())
    summary = train(fewer, tmp_path / "run", True, said)
    assert (summary["first_step"], summary["steps"]) == (3, 6)
    assert re.search(
        r"buckets is \['r\S+'\], was \['r.*'\] at step-000003: from here on not the bits", said.export_text()
    )


def test_a_resume_after_any_step_also_at_an_epochs_end_gives_the_bits_of_the_unbroken_run(tmp_path):
    # Three repeats of an extraction, two micro-steps a step: steps end inside extractions and inside epochs.
    changes = {"rows": ordinary_rows(8), "drafter": {"reuse": 3}, "checkpoint": {"every": 1, "keep": 20}}
    per_epoch = 3 * make_plan(tiny_profile(tmp_path, **changes)).schedule.batches_per_epoch  # micro-steps
    steps = per_epoch + 1  # two epochs, and a step more
    profile = tiny_profile(tmp_path, run={"steps": steps}, **changes)
    run(profile, tmp_path / "whole")
    # Step `per_epoch` ends the second epoch; half of it the first, or lies beside its end.
    ends = {per_epoch // 2, per_epoch, per_epoch // 2 + 1, 1, steps - 1}
    for step in sorted(ends):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"stopped-{step}")
        for path in checkpoint.found(folder / "checkpoints"):
            if checkpoint.step_of(path) > step:
                shutil.rmtree(path)
        assert run(profile, folder, resume=True)["first_step"] == step
        assert_same_bits(masters(tmp_path / "whole", steps), masters(folder, steps))
        assert figures_of(folder) == figures_of(tmp_path / "whole")


def figures_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "time": None} for line in lines]
