"""Profiles and shards of any content: each is loaded as it was meant, or is one readable error.

FUZZ=10000 pytest tests/test_fuzz_inputs.py tries more.
"""

import dataclasses
import os

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tiny import ordinary_rows, profile_values, write_shards

from draftgraph.engine.config import Profile, from_values, load_profile, to_toml
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.errors import DataError, DraftgraphError, UsageError
from draftgraph.engine.plan import make_plan

often = settings(
    max_examples=int(os.environ.get("FUZZ", "100")),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEYS = [
    (section.name, key.name)
    for section in dataclasses.fields(Profile)
    for key in dataclasses.fields(section.type)  # type: ignore[arg-type]
]
NUMBERS = some.integers(-2, 70) | some.floats() | some.sampled_from([2**31, 2**64, -(2**31), 0.5, 1e-9])
VALUES = (
    NUMBERS
    | some.booleans()
    | some.text(max_size=4)
    | some.sampled_from(["cpu", "cuda:0", "cuda:9", "meta", "graph", "float32", "dpace", "in-row", "/", "random:x"])
    | some.lists(NUMBERS | some.sampled_from(["cpu", "x"]), max_size=3)
    | some.dictionaries(some.text(max_size=3), some.integers(), max_size=2)
)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    return profile_values(tmp_path_factory.mktemp("fuzz"))


@often
@given(some.dictionaries(some.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_a_profile_of_any_values_is_planned_or_refused(values, changes):
    changed = {section: dict(keys) for section, keys in values.items()}
    for (section, key), value in changes.items():
        changed.setdefault(section, {})[key] = value
    try:
        profile = from_values(changed)
    except UsageError:
        return
    assert from_values(dataclasses.asdict(profile)) == profile
    try:
        plan = make_plan(profile)
    except DraftgraphError:
        return
    assert len(plan.assignment) == len(plan.lengths)
    assert all(plan.buckets[b].context >= n for b, n in zip(plan.assignment, plan.lengths, strict=True))


@often
@given(some.binary(max_size=40), some.data())
def test_a_profile_of_any_bytes_is_read_or_refused(values, tmp_path, new, data):
    path = tmp_path / "profile.toml"
    text = tomli_w.dumps(values).encode()
    at = data.draw(some.integers(0, len(text)))
    path.write_bytes(text[:at] + new + text[at + data.draw(some.integers(0, 40)) :])
    try:
        profile = load_profile(str(path))
    except UsageError:
        return
    again = tmp_path / "again.toml"
    again.write_text(to_toml(profile))
    assert load_profile(str(again)) == profile


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "shards"
    write_shards(folder, ordinary_rows(6))
    reader = ShardReader(folder)
    return folder, [tuple(part.copy() for part in reader[row]) for row in range(len(reader))]


@often
@given(some.sampled_from(["shards.json", "offsets.npy", "tokens-00000.npy", "mask-00000.npy"]), some.data())
def test_a_shard_folder_with_any_change_is_the_same_or_refused(shards, name, data):
    folder, rows = shards
    path = folder / name
    before = path.read_bytes()
    at = data.draw(some.integers(0, len(before)))
    new = data.draw(some.binary(max_size=16) | some.sampled_from([b"-1", b"null", b"9" * 12, b"{", b"[]"]))
    path.write_bytes(before[:at] + new + before[at + data.draw(some.sampled_from([len(new), 0, 1, 10**6])) :])
    try:
        reader = ShardReader(folder)
        reader.valid_anchors("next-supervised", 4)
        reader.verify()
        found = [reader[row] for row in range(len(reader))]
        assert len(found) == len(rows)
        for (ids, mask), (expected_ids, expected_mask) in zip(found, rows, strict=True):
            assert np.array_equal(ids, expected_ids) and np.array_equal(mask, expected_mask)
    except DataError:
        pass
    finally:
        path.write_bytes(before)
