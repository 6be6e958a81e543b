"""The data process and its ring of slots."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import SlotLayout, collate
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.data.shards import RandomRows, ShardReader
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.errors import DataError

BUCKETS = (Bucket(2, 16, 8), Bucket(3, 64, 16))
ROWS = RandomRows(np.random.default_rng(0).integers(1, 64, 40), vocab_size=64, seed=0)
SCHEDULE = Schedule((ROWS.lengths > 16).astype(int), BUCKETS, seed=2)
LAYOUTS = tuple(SlotLayout(bucket, 2) for bucket in BUCKETS)
DRAW = AnchorDraw(seed=2, num_anchors=8, block_size=4)


def expected(batch):
    buffer = np.zeros(LAYOUTS[batch.bucket_index].num_bytes, dtype=np.uint8)
    views = LAYOUTS[batch.bucket_index].numpy_views(buffer)
    collate(batch, ROWS, views, DRAW)
    return {name: view.tobytes() for name, view in views.items()}


@pytest.mark.parametrize("first", [0, 17])
def test_slots_hold_the_schedules_batches_in_order(first):
    plan = SCHEDULE.at(first)
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=3, first=first) as loader:
        held = 0
        for number in range(25):
            slot, batch = loader.next()
            held += 1
            assert batch.index == first + number == next(plan).index
            views = LAYOUTS[batch.bucket_index].numpy_views(loader.buffers[slot])
            assert {name: view.tobytes() for name, view in views.items()} == expected(batch)
            # Hold two slots at a time, so that releases lag behind as copies do.
            if held == 2:
                loader.release()
                held -= 1


def test_a_taken_slot_is_not_rewritten_before_it_is_released():
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        slot, _ = loader.next()
        before = loader.buffers[slot].tobytes()
        loader.next()
        time.sleep(0.2)
        assert loader.buffers[slot].tobytes() == before


def test_buffers_are_page_aligned_for_pinning():
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        assert all(buffer.ctypes.data % 4096 == 0 for buffer in loader.buffers)
        assert all(len(buffer) >= max(layout.num_bytes for layout in LAYOUTS) for buffer in loader.buffers)


def test_an_error_in_the_data_process_arrives_as_its_message(tmp_path):
    with ShardWriter(tmp_path / "a", vocab_size=64, fingerprint="", max_context=64) as writer:
        for _ in range(4):
            writer.append(np.array([1, 2, 64]), np.ones(3))
        writer.finish({})
    schedule = Schedule(np.zeros(4, dtype=int), BUCKETS, 0)
    with (
        Loader(ShardReader(tmp_path / "a"), schedule, LAYOUTS, DRAW, num_slots=2) as loader,
        pytest.raises(DataError, match="holds token ids 1 to 64"),
    ):
        loader.next()


def test_a_killed_data_process_is_an_error_and_never_a_hang():
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        loader.next()
        os.kill(loader._process.pid, signal.SIGKILL)
        loader._process.wait()
        loader.release()
        with pytest.raises(DataError, match="ended by signal 9"):
            for _ in range(3):
                loader.next()


def test_a_data_process_that_hangs_is_ended_and_an_error(monkeypatch):
    monkeypatch.setattr("draftgraph.engine.data.loader._HANG_SECONDS", 1)
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        loader._arrival.poll(60_000)  # it has started
        os.kill(loader._process.pid, signal.SIGSTOP)
        with pytest.raises(DataError, match=r"nothing for 1 s"):
            for _ in range(4):
                loader.next()
                loader.release()
    assert loader._process.returncode == -signal.SIGKILL


def test_a_run_that_is_to_end_does_not_wait_for_data_that_hangs():
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        loader._arrival.poll(60_000)  # it has started
        loader.give_up = lambda: True
        os.kill(loader._process.pid, signal.SIGSTOP)
        with pytest.raises(DataError, match=r"nothing for 1 s"):
            for _ in range(4):
                loader.next()
                loader.release()


def test_shards_that_were_written_anew_are_refused_by_the_data_process(tmp_path):
    def write():
        with ShardWriter(tmp_path / "a", vocab_size=64, fingerprint="", max_context=64) as writer:
            writer.append(np.arange(8), np.ones(8))
            writer.finish({})

    write()
    reader = ShardReader(tmp_path / "a")
    write()
    schedule = Schedule(np.zeros(1, dtype=int), (Bucket(1, 16, 8),), 0)
    layouts = [SlotLayout(schedule.buckets[0])]
    with Loader(reader, schedule, layouts, DRAW, num_slots=2) as loader, pytest.raises(DataError, match="changed on"):
        loader.next()


def test_ctrl_c_does_not_reach_the_data_process():
    with Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2) as loader:
        loader.next()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(loader._process.pid, number)
        loader.release()
        for _ in range(5):
            loader.next()
            loader.release()


def test_close_ends_the_data_process():
    loader = Loader(ROWS, SCHEDULE, LAYOUTS, DRAW, num_slots=2)
    loader.close()
    assert loader._process.returncode == 0


PARENT = """
import os, signal, numpy as np
from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import SlotLayout
from draftgraph.engine.data.loader import Loader
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.data.shards import RandomRows
buckets = (Bucket(2, 16, 8),)
schedule = Schedule(np.zeros(4, dtype=int), buckets, 0)
rows = RandomRows(np.full(4, 16), 64, 0)
loader = Loader(rows, schedule, [SlotLayout(buckets[0])], AnchorDraw(0, 8, 4), num_slots=2)
loader.next()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_data_process_ends_when_its_parent_is_killed():
    # The data process holds the same stderr: reading it to its end waits for both.
    parent = subprocess.run([sys.executable, "-c", PARENT], stderr=subprocess.PIPE, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL
    assert parent.stderr == b""


def test_the_data_process_imports_no_torch():
    program = "import sys, draftgraph.engine.data.loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
