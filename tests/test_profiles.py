"""Receipts and profiles: what cannot be found out is None, and a receipt is whole or not there."""

import json

import pytest

from draftgraph.profiles import measure
from draftgraph.profiles.load import ProfileNotFound, read_profile, shipped


def test_a_receipt_names_machine_versions_commit_and_profile():
    found = measure.receipt("work", {"run": {"steps": 1}}, ours={"x": 1.5})
    assert {"workload", "gpu", "driver", "torch", "triton", "transformers", "fla", "commit", "date", "profile"} <= set(
        found
    )
    assert found["workload"] == "work" and found["ours"] == {"x": 1.5} and found["torch"]
    assert found["peer"] is None and found["ratio"] is None and found["ceiling_tflops"] is None


def test_a_package_or_program_that_is_missing_is_none():
    assert measure._version("no-such-distribution") is None
    assert measure._output("no-such-program") is None
    assert measure._output("false") is None


def test_outside_a_checkout_the_environment_says_the_commit(monkeypatch):
    monkeypatch.setattr(measure, "_output", lambda *command: None)
    monkeypatch.setenv("DRAFTGRAPH_COMMIT", "abc123")
    assert measure.receipt("work", "profile")["commit"] == "abc123"


def test_a_receipt_replaces_an_older_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "results" / "a.json"
    for value in (1, 2):
        measure.write_receipt(path, {"value": value})
    assert json.loads(path.read_text()) == {"value": 2}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_profile_is_found_by_name_or_path_and_else_the_names_are_said(tmp_path):
    assert read_profile("smollm2-cpu") == read_profile("smollm2-cpu.toml")
    (tmp_path / "own.toml").write_text("[run]\nsteps = 3\n")
    assert read_profile(str(tmp_path / "own.toml")) == {"run": {"steps": 3}}
    with pytest.raises(ProfileNotFound, match="smollm2-cpu") as error:
        read_profile("nowhere")
    assert all(name in str(error.value) for name in shipped())
