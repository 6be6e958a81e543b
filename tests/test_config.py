"""Profiles: the same TOML out, shipped ones that read, overrides."""

import tomllib
from pathlib import Path

import pytest

from draftgraph.engine.config import from_values, load_profile, to_toml
from draftgraph.profiles.load import set_key, shipped


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_profile_reads_and_writes_the_same(name):
    profile = load_profile(name)
    assert from_values(tomllib.loads(to_toml(profile))) == profile


def test_an_override_is_read_as_toml_and_else_as_a_string():
    values: dict = {}
    for text in ("run.steps=3", "optim.lr = 1e-3", "target.model=smollm2", "placement.targets=['cpu']"):
        set_key(values, text)
    assert values == {
        "run": {"steps": 3},
        "optim": {"lr": 1e-3},
        "target": {"model": "smollm2"},
        "placement": {"targets": ["cpu"]},
    }


def test_the_readmes_least_profile_is_one():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    block = readme.split("The least that a profile")[1].split("\n\n")[1]
    profile = from_values(tomllib.loads("\n".join(line.strip() for line in block.splitlines())))
    assert profile.capture.mode == "graph" and profile.drafter.block_size == 8


def test_an_override_of_one_name_of_a_table_leaves_the_others():
    values: dict = {"capture": {"ops": {"attention": "cudnn"}}}
    set_key(values, "capture.ops.gated_delta=fla")
    assert values == {"capture": {"ops": {"attention": "cudnn", "gated_delta": "fla"}}}
