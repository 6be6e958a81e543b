"""Devices sampled in the background: several, MIG slices, refusals, no driver; flat or not, and where it moved."""

import json
import time

import pytest
from fake_nvml import GIB, Nvml

from draftgraph.capture import nvml
from draftgraph.engine.run.clocks import Clocks
from draftgraph.engine.run.flatness import Flatness, duration
from draftgraph.engine.run.sampler import STEADY, Sampler

TWO = {"cuda:0": "aa", "cuda:1": "bb"}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled(path, library, uuids=TWO, seconds=0.01, until=0.2):
    """A process of a run that warms up and is steady for a moment."""
    sampler = Sampler(path, uuids, seconds, library)
    sampler.start()
    time.sleep(until / 2)
    sampler.enter(STEADY)
    time.sleep(until)
    sampler.close()
    return sampler, lines_of(path)


def test_every_device_is_sampled_in_every_phase(tmp_path):
    library = Nvml({"GPU-aa": lambda: 10 * GIB, "GPU-bb": lambda: 20 * GIB})
    sampler, lines = sampled(tmp_path / "devices.jsonl", library)
    assert lines[0]["event"] == "start"
    assert [line["phase"] for line in lines if line.get("event") == "phase"] == ["steady", "end"]
    for phase in ("warm-up", "steady"):
        assert {"cuda:0", "cuda:1", "host"} == {
            line["device"] for line in lines if line["phase"] == phase and "device" in line
        }
    sample = next(line for line in lines if line.get("device") == "cuda:1")
    del sample["time"]
    assert sample == {
        "phase": "warm-up",
        "device": "cuda:1",
        "used_bytes": 20 * GIB,
        "total_bytes": 140 * GIB,
        "utilisation": 97,
        "power_w": 612.0,
        "sm_mhz": 1980,
        "temperature_c": 61,
        "throttled": ["power cap", "hardware thermal slowdown"],
    }
    assert sampler.trouble == "" and not sampler._thread.is_alive()
    assert sampler.flatness.sentences() == [
        f"cuda:{n}: flat: 0 MiB over 0 seconds (warm-up: +0.0 GiB)" for n in range(2)
    ]


def test_a_change_of_used_memory_is_written_however_seldom_samples_are(tmp_path):
    asked = iter(range(10**6))
    library = Nvml({"GPU-aa": lambda: 10 * GIB + (next(asked) > 18) * 2**20})
    sampler = Sampler(tmp_path / "devices.jsonl", {"cuda:0": "aa"}, 0.01, library)
    sampler.start()
    sampler._began -= 10**7  # a run of months: a sample is due in a day
    sampler.enter(STEADY)
    time.sleep(0.6)
    sampler.close()
    steady = [line for line in lines_of(sampler.path) if line.get("device") == "cuda:0" and line["phase"] == "steady"]
    assert [line["used_bytes"] - 10 * GIB for line in steady[:2]] == [0, 2**20] and len(steady) <= 3
    assert "moved by 1.0 MiB in the steady phase" in sampler.flatness.sentences()[0]


def test_a_mig_slice_is_found_by_its_own_name_and_what_it_does_not_tell_is_left_out(tmp_path):
    refused = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons")
    _, lines = sampled(tmp_path / "devices.jsonl", Nvml({"MIG-aa": lambda: GIB}, refused), {"cuda:0": "aa"})
    sample = next(line for line in lines if line.get("device") == "cuda:0")
    assert sample["used_bytes"] == GIB and sample["temperature_c"] == 61
    assert not {"utilisation", "power_w", "throttled"} & set(sample)


def test_memory_that_may_not_be_read_is_not_judged(tmp_path):
    library = Nvml({"GPU-aa": lambda: GIB}, ("nvmlDeviceGetMemoryInfo",))
    sampler, lines = sampled(tmp_path / "devices.jsonl", library, {"cuda:0": "aa"})
    assert any(line.get("power_w") == 612.0 for line in lines) and sampler.flatness.sentences() == []


@pytest.mark.parametrize("library", [Nvml({}), Nvml({"GPU-aa": lambda: GIB}, ("nvmlInit",)), None])
def test_without_nvml_a_plain_sentence_says_so_and_phases_are_kept(tmp_path, library):
    sampler, lines = sampled(tmp_path / "devices.jsonl", library, until=0.05)
    assert sampler.trouble.startswith("no samples of cuda:0, cuda:1: NVML says '")
    assert lines[0]["note"] == sampler.trouble
    assert {line["device"] for line in lines if "device" in line} == {"host"}


def test_a_file_that_cannot_be_written_costs_the_run_nothing(tmp_path):
    (tmp_path / "devices.jsonl").mkdir()
    sampler = Sampler(tmp_path / "devices.jsonl", {"cuda:0": "aa"}, 0.01, Nvml({"GPU-aa": lambda: GIB}))
    sampler.start()
    sampler.enter(STEADY)
    time.sleep(0.1)
    sampler.close()
    assert sampler.trouble == "devices.jsonl is not written: Is a directory"
    assert sampler.flatness.sentences()[0].startswith("cuda:0: flat")  # what was seen is judged all the same


def test_a_full_disk_costs_the_run_nothing(tmp_path):
    (tmp_path / "devices.jsonl").symlink_to("/dev/full")
    sampler = Sampler(tmp_path / "devices.jsonl", {}, 0.01)
    sampler.start()
    sampler.close()
    assert sampler.trouble == "devices.jsonl is not written: No space left on device"


def test_a_driver_that_hangs_does_not_hold_the_run(tmp_path):
    library = Nvml({"GPU-aa": lambda: time.sleep(2.0) or GIB})
    sampler = Sampler(tmp_path / "devices.jsonl", {"cuda:0": "aa"}, 0.01, library)
    since = time.perf_counter()
    sampler.start()
    sampler.enter(STEADY)
    assert time.perf_counter() - since < 1.0
    sampler.close()


def test_no_samples_where_they_are_switched_off(tmp_path):
    _, lines = sampled(tmp_path / "devices.jsonl", Nvml({"GPU-aa": lambda: GIB}), {"cuda:0": "aa"}, seconds=0.0)
    assert [line.get("event") for line in lines] == ["start", "phase", "phase"] and lines[-1]["phase"] == "end"


def test_a_later_process_of_the_run_is_judged_alone():
    flatness = Flatness()
    for began, used in ((0, 5), (1000, 7)):
        flatness.add({"event": "start", "time": began, "phase": "warm-up"})
        for second in range(5):
            phase = "warm-up" if second < 2 else "steady"
            grown = min(second, 1) * 3 * GIB
            line = {"time": began + 60 * second, "phase": phase, "device": "cuda:0", "used_bytes": used * GIB + grown}
            flatness.add(line)
    assert flatness.sentences() == ["cuda:0: flat: 0 MiB over 2 minutes (warm-up: +3.0 GiB)"]
    assert Flatness().sentences() == []


def test_clocks_of_the_steady_phase_and_what_held_them_back_are_told_per_device():
    clocks, sample = Clocks(), {"phase": STEADY, "device": "cuda:0", "power_w": 690.4}
    clocks.add({"event": "start", "phase": "warm-up"})
    clocks.add(sample | {"phase": "warm-up", "sm_mhz": 1980, "throttled": []})
    clocks.add(sample | {"sm_mhz": 1500, "throttled": ["power cap"]})
    clocks.add(sample | {"sm_mhz": 1400, "throttled": ["power cap", "thermal slowdown"]})
    clocks.add(sample | {"device": "cuda:1", "sm_mhz": 1900, "throttled": []})
    clocks.add({"phase": STEADY, "device": "host", "used_bytes": 1})
    clocks.add({"phase": STEADY, "device": "cuda:2", "sm_mhz": 1900})  # a slice that tells no power
    assert clocks.sentences() == [
        "cuda:0: 1,450 MHz, 690 W, held back by power cap in 100%, thermal slowdown in 50% of 2 samples",
        "cuda:1: 1,900 MHz, 690 W",
    ]
    clocks.add({"event": "start", "phase": "warm-up"})
    assert clocks.sentences() == []


def test_a_duration_is_said_in_its_own_unit():
    said = [duration(seconds) for seconds in (0.4, 119, 720, 9e4)]
    assert said == ["0 seconds", "119 seconds", "12 minutes", "25 hours"]


def test_nvml_that_is_not_there_is_one_kind_of_failure():
    with pytest.raises(nvml.Unavailable):
        nvml.open_handles(["aa"], Nvml({}))
