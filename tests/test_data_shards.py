"""Token shards: what goes in comes out, and damage is seen."""

import json
import pickle

import numpy as np
import pytest

from draftgraph.engine.data.anchors import RULES, valid_anchors
from draftgraph.engine.data.shards import RandomRows, ShardReader
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.errors import DataError

K = 4
LENGTHS = [1, 2, K - 1, K, K + 1, 30, 7, 12]


def rows(seed=0):
    generator = np.random.default_rng(seed)
    return [(generator.integers(0, 100, n), generator.random(n) < 0.7) for n in LENGTHS]


def write(folder, data, shard_tokens=20, vocab_size=100):
    facts = {"vocab_size": vocab_size, "fingerprint": "abc", "max_context": 64}
    with ShardWriter(folder, **facts, shard_tokens=shard_tokens) as writer:
        for ids, mask in data:
            writer.append(ids, mask)
        return writer.finish({"rows_read": len(data)})


def test_rows_come_back_as_written_over_several_shards(tmp_path):
    shards = write(tmp_path / "a", rows())
    reader = ShardReader(tmp_path / "a")
    assert shards == len(list((tmp_path / "a").glob("tokens-*.npy"))) == 3
    assert len(reader) == len(LENGTHS)
    assert reader.lengths.tolist() == LENGTHS
    assert (reader.vocab_size, reader.fingerprint, reader.facts["max_context"]) == (100, "abc", 64)
    assert reader.facts["doctor"] == {"rows_read": len(LENGTHS)}
    for index, (ids, mask) in enumerate(rows()):
        found_ids, found_mask = reader[index]
        assert found_ids.dtype == np.int32
        assert found_mask.dtype == bool
        assert found_ids.tolist() == ids.tolist()
        assert found_mask.tolist() == mask.tolist()


@pytest.mark.parametrize("rule", RULES)
def test_counts_of_valid_anchors_equal_those_of_each_row(tmp_path, rule, monkeypatch):
    monkeypatch.setattr("draftgraph.engine.data.shards._CHUNK_TOKENS", 9)
    write(tmp_path / "a", rows())
    expected = [valid_anchors(mask, rule, K).sum() for _, mask in rows()]
    assert ShardReader(tmp_path / "a").valid_anchors(rule, K).tolist() == expected


def test_a_reader_travels_to_another_process_by_path(tmp_path):
    write(tmp_path / "a", rows())
    sent = pickle.dumps(ShardReader(tmp_path / "a"))
    assert len(sent) < 600
    assert pickle.loads(sent)[5][0].tolist() == rows()[5][0].tolist()


def test_an_unfinished_writer_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(RuntimeError),
        ShardWriter(tmp_path / "a", vocab_size=9, fingerprint="", max_context=9) as writer,
    ):
        writer.append(np.array([1]), np.array([True]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_older_shard_folder_is_replaced_and_anything_else_is_kept(tmp_path):
    write(tmp_path / "a", rows())
    write(tmp_path / "a", rows(1)[:2])
    assert len(ShardReader(tmp_path / "a")) == 2
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"thesis\.txt"):
        write(tmp_path / "a", rows())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="not a folder of token shards"):
        write(tmp_path / "file", rows())
    assert (tmp_path / "a" / "thesis.txt").read_text() == "years of work"


def test_no_rows_are_a_readable_error(tmp_path):
    with pytest.raises(DataError, match="nothing to train on"):
        write(tmp_path / "a", [])
    assert list(tmp_path.iterdir()) == []


def truncate(folder):
    file = folder / "tokens-00001.npy"
    file.write_bytes(file.read_bytes()[:-8])


def edit(**changes):
    def change(folder):
        facts = json.loads((folder / "shards.json").read_text())
        (folder / "shards.json").write_text(json.dumps({**facts, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"tokens-00001\.npy: damaged"),
        (lambda folder: (folder / "mask-00000.npy").unlink(), r"mask-00000\.npy: damaged or missing"),
        (lambda folder: (folder / "offsets.npy").write_bytes(b""), r"offsets\.npy: damaged"),
        (lambda folder: np.save(folder / "offsets.npy", np.zeros(9, dtype=np.int64)), "offsets and shards disagree"),
        (lambda folder: np.save(folder / "mask-00000.npy", np.zeros(15)), "expected uint8"),
        (lambda folder: (folder / "shards.json").unlink(), "no token shards here"),
        (lambda folder: (folder / "shards.json").write_text("{"), "damaged"),
        (edit(format="other"), "not written by"),
        (edit(version=7), "version 7, expected 1"),
        (edit(rows=3), "damaged"),
        (edit(shards=[]), "damaged"),
    ],
)
def test_a_damaged_folder_is_a_readable_error(tmp_path, damage, message):
    write(tmp_path / "a", rows())
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=message):
        ShardReader(tmp_path / "a")


def test_a_folder_that_is_not_there_is_a_readable_error(tmp_path):
    with pytest.raises(DataError, match="draftgraph prepare"):
        ShardReader(tmp_path / "absent")


@pytest.mark.parametrize("token", [-1, 100])
def test_token_ids_outside_the_vocabulary_are_seen_on_reading(tmp_path, token):
    write(tmp_path / "a", [(np.array([1, 2]), np.ones(2)), (np.array([1, token]), np.ones(2))])
    reader = ShardReader(tmp_path / "a")
    reader[0]
    with pytest.raises(DataError, match="row 1 holds token ids"):
        reader[1]


@pytest.mark.parametrize("rule", RULES)
def test_random_rows_read_like_shards(rule):
    source = RandomRows(np.array(LENGTHS), vocab_size=50, seed=1)
    for index, length in enumerate(LENGTHS):
        ids, mask = source[index]
        assert len(ids) == len(mask) == length
        assert (ids.min() >= 0) and (ids.max() < 42)
        assert ids.tolist() == source[index][0].tolist()
        assert mask.sum() == length - length // 4
        assert source.valid_anchors(rule, K)[index] == valid_anchors(mask, rule, K).sum()
