"""Starting from a released drafter: its very weights, or a refusal that names what differs."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console
from tiny import tiny_profile, write_target

from draftgraph.engine.build import build
from draftgraph.engine.config import Profile
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.released import load_zlab, read_shape
from draftgraph.engine.plan import make_plan
from draftgraph.engine.saved import card_facts, keep_evaluation, load_saved, untrained
from draftgraph.engine.train import train


@pytest.fixture
def release(tmp_path):
    """The profile of a drafter, and its release."""
    profile = tiny_profile(tmp_path, drafter={"sliding_layers": 1, "sliding_window": 8})
    plan = make_plan(profile)
    drafter = Drafter(plan.shape, 1)
    drafter.initialise(11, 0.1)
    export_drafter(tmp_path / "release", drafter, plan.target_config, dtype=torch.float32, card={})
    return profile, tmp_path / "release"


def changed(profile: Profile, **drafter: object) -> Profile:
    return dataclasses.replace(profile, drafter=dataclasses.replace(profile.drafter, **drafter))


def edit(release, **fields):
    config = json.loads((release / "config.json").read_text())
    config = {name: value for name, value in {**config, **fields}.items() if value != "absent"}
    (release / "config.json").write_text(json.dumps(config))


def test_step_1_has_the_released_weights_on_every_drafter(release):
    profile, folder = release
    placement = dataclasses.replace(profile.placement, drafters=["cpu", "cpu"], look_ahead=1)
    profile = dataclasses.replace(changed(profile, init=str(folder)), placement=placement)
    engine = build(make_plan(profile))
    engine.initialise()
    _, state = load_zlab(folder)
    for lane in engine.rig.drafters:
        for name, parameter in lane.drafter.named_parameters():
            assert torch.equal(parameter, state[name]), name
    slices = torch.cat([lane.optimizer.master for lane in engine.rig.drafters])
    assert torch.equal(slices, engine.rig.drafters[0].flat.values)


def test_a_run_goes_on_where_the_released_one_was(release, tmp_path):
    profile, _ = release
    quiet = Console(quiet=True)
    run = dataclasses.replace(profile.run, steps=40)
    first = train(dataclasses.replace(profile, run=run), tmp_path / "first", False, quiet)
    saved = load_saved(tmp_path / "first")
    export_drafter(tmp_path / "one", saved.drafter, make_plan(profile).target_config, dtype=torch.float32, card={})
    second = train(changed(profile, init=str(tmp_path / "one")), tmp_path / "second", False, quiet)
    assert second["loss_first"] < 0.5 * (first["loss_first"] + first["loss_last"])
    again = load_saved(tmp_path / "second")
    assert torch.equal(untrained(again).fc.weight, saved.drafter.fc.weight)
    assert card_facts(tmp_path / "second", again, "some/target")["continues"] == "one"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layers": 3}, "num_layers is 2 there and 3 here (write drafter.layers = 2)"),
        ({"block_size": 8}, "block_size is 4 there and 8 here (write drafter.block_size = 4)"),
        ({"heads": 8, "kv_heads": 2}, "num_heads is 4 there and 8 here (write drafter.heads = 4)"),
        ({"heads": 4, "kv_heads": 4}, "num_kv_heads is 2 there and 4 here (write drafter.kv_heads = 2)"),
        ({"target_layer_ids": [0, 2]}, "(write drafter.target_layer_ids = [1, 3])"),
        ({"sliding_layers": 2}, "(write drafter.sliding_layers = 1)"),
        ({"sliding_rule": "speculators"}, '(write drafter.sliding_rule = "served")'),
        ({"mask_token_id": 5}, "mask_token_id is 96 there and 5 here (write drafter.mask_token_id = 96)"),
    ],
)
def test_another_drafter_is_refused_by_field_with_what_to_write(release, keys, message):
    profile, folder = release
    with pytest.raises(UsageError) as caught:
        build(make_plan(changed(profile, init=str(folder), **keys)))
    assert message in str(caught.value)


def test_a_drafter_of_another_target_is_refused_by_field(release, tmp_path):
    profile, folder = release
    target = dataclasses.replace(profile.target, model=write_target(tmp_path, hidden_size=64, vocab_size=99))
    with pytest.raises(UsageError) as caught:
        build(make_plan(dataclasses.replace(changed(profile, init=str(folder)), target=target)))
    for part in ("hidden_size is 32 there and 64 here", "vocab_size is 97 there and 99 here", "another target's"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": "absent"},
        {"rope_theta": "absent"},
        {"rope_parameters": "absent"},
        {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3]}},
    ],
)
def test_older_and_newer_releases_read_the_same(release, fields):
    _, folder = release
    before = read_shape(folder)
    edit(folder, **fields)
    assert read_shape(folder) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("architectures", ["DFlash2DraftModel"]),
        ("dflash_config", {"mask_token_id": 96, "target_layer_ids": [1, 3], "final_logit_softcapping": 30.0}),
    ],
)
def test_a_release_that_computes_something_else_is_refused(release, name, value):
    profile, folder = release
    edit(folder, **{name: value})
    with pytest.raises(DataError, match="does not compute"):
        build(make_plan(changed(profile, init=str(folder))))


def test_what_eval_measured_of_the_checkpoint_is_in_the_card_and_a_folder_that_refuses_it_is_told(release, tmp_path):
    profile, _ = release
    train(profile, tmp_path / "run", False, Console(quiet=True))
    saved, said = load_saved(tmp_path / "run"), []
    sets = [
        {"name": "/some/where/questions.jsonl", "prompts": 2, "acceptance": 1.5},
        {"name": "unanswered.txt", "prompts": 1, "acceptance": None},
    ]
    summary = {"step": saved.step, "temperature": 0.0, "sets": sets}
    keep_evaluation(tmp_path / "run", saved, summary, said.append)
    earlier = {**summary, "step": 1, "sets": [{**sets[0], "name": "human-eval"}]}
    keep_evaluation(tmp_path / "run", saved, earlier, said.append)
    facts = card_facts(tmp_path / "run", saved, "smollm2")
    assert facts["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert [name for name in facts if "acceptance" in name] == ["acceptance length, 2 prompts of questions.jsonl"]
    assert not said
    keep_evaluation(tmp_path / "nowhere", saved, summary, said.append)
    assert "No such file" in said[0]
