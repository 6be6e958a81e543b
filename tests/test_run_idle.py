"""Where the time of lanes goes, on devices that only keep time."""

import pytest

from draftgraph.engine.predict.simulate import SimulatedLane
from draftgraph.engine.run.idle import DATA, HAND_OFF, WORK, Meter, p99_ms
from draftgraph.engine.run.simulated import Clock, SimulatedDevice, SimulatedEvent


def test_a_lane_s_time_is_told_by_what_it_waited_for():
    clock = Clock()
    lane = SimulatedLane("target 0", SimulatedDevice("cuda:0", clock), lambda step, bucket: 30.0, blocking=False)
    meter = Meter([lane], most_marks=4, every=1)
    meter.begin()
    clock.wait_until(20.0)  # the host came late, since the data did
    meter.mark(lane, DATA)
    buffer_free = SimulatedEvent(clock)
    buffer_free.at_ms = 70.0
    lane.stream.wait_event(buffer_free)
    meter.mark(lane, HAND_OFF)
    lane.replay("target")
    meter.mark(lane, WORK)
    meter.end()
    meter.read()
    assert meter.shares() is None and meter.newest() == {}  # it has not happened yet
    clock.wait_until(lane.stream.ready_ms)
    meter.begin()
    expected = {"work": 0.3, "hand-off": 0.5, "reduction": 0.0, "data": 0.2, "host": 0.0}
    assert meter.shares()["target 0"] == pytest.approx(expected)
    assert meter.newest()["lane_time"]["target 0"] == pytest.approx(expected) and meter.newest() == {}


def test_one_wait_in_a_hundred_is_named():
    assert p99_ms([]) is None
    assert p99_ms([0.0] * 98 + [0.005] * 2) == pytest.approx(5.0)
