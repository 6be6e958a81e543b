"""report.html: small however long the run, whole whatever the folder holds, harmless whatever is written there."""

import itertools
import json
import math
import re
from html.parser import HTMLParser
from random import Random
from xml.etree import ElementTree

import pytest
from recorded_run import START, write_devices, write_run

from draftgraph.engine.cli import main
from draftgraph.engine.errors import UsageError
from draftgraph.engine.report.curves import BINS, Curve
from draftgraph.engine.report.page import write_report
from draftgraph.engine.report.record import read_run
from draftgraph.engine.report.svg import Line, Plot, Point, bar_plot, line_plot, ticks

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balance(HTMLParser):
    """Every element that opens closes, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path):
    """The text of a report, after what every report has to be: balanced, drawn, free of scripts and of the network."""
    text = path.read_text()
    balance = Balance()
    balance.feed(text)
    assert not balance.open and not balance.seen & {"script", "link", "img", "iframe", "object", "a"}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL))
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in re.sub(r"<title>.*?</title>", "", drawing)
    return text, drawings


def test_a_report_of_a_hundred_thousand_steps_on_eight_devices_is_below_two_megabytes(tmp_path):
    run = write_run(tmp_path / "long", 100_000, num_devices=8)
    text, drawings = checked(write_report(run))
    assert len(text.encode()) < 1_000_000
    assert len(drawings) == 7 + 1 + 5 + 1  # training, memory, other samples, lengths
    assert "100,000" in text and "cuda:7: flat: 0 MiB over 8 minutes (warm-up: +80.0 GiB)" in text
    assert "1 of 100,000 steps took more than three times the usual" in text and ">50,000<" in text
    assert "held back by power cap" in text and 'class="shade"' in text


def test_a_curve_keeps_the_extremes_and_the_mean_of_what_it_was_given():
    curve = Curve()
    values = [math.sin(i / 50) for i in range(12_345)]
    values[7777] = 9.0
    for index, value in enumerate(values):
        curve.add(index, value)
    points = curve.points
    assert BINS // 2 <= len(points) <= BINS
    assert max(point.high for point in points) == 9.0 and min(point.low for point in points) == min(values)
    assert [point.x for point in points] == sorted(point.x for point in points)
    peak = next(point for point in points if point.high == 9.0)
    assert abs(peak.x - 7777) <= 64 and peak.low <= peak.mean <= peak.high


def test_a_curve_leaves_out_what_is_no_figure():
    curve = Curve()
    for value in (None, True, "3", math.nan, math.inf, [1.0], 2, 3.0):
        curve.add(1, value)
    assert [(p.low, p.mean, p.high) for p in curve.points] == [(2, 2.0, 2), (3.0, 3.0, 3.0)]


@pytest.mark.parametrize("low, high", [(0, 1), (-3.7, 11.2), (1e-9, 3e-9), (0, 84.3), (99.9, 100.1), (0, 7e12)])
def test_ticks_are_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 8 and low - 1e-12 <= found[0] and found[-1] <= high * (1 + 1e-9)
    step = found[1] - found[0]
    assert float(f"{step:.0e}") == pytest.approx(step)


def test_whatever_a_run_folder_holds_is_text(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    run = write_run(tmp_path / "a<b&c", 300)
    receipt = json.loads((run / "receipt.json").read_text())
    receipt |= {"gpu": evil, "commit": evil}
    receipt["ours"] |= {"steady_state": evil, "loss_last": evil}
    (run / "receipt.json").write_text(json.dumps(receipt))
    (run / "profile.toml").write_text(f"[target]\nmodel = '''{evil}'''\n")
    warmup = json.loads((run / "warmup.json").read_text())
    warmup["devices"][0]["sentence"] = warmup["graphs"][0]["bucket"] = warmup["graphs"][0]["lane"] = evil
    (run / "warmup.json").write_text(json.dumps(warmup))
    with (run / "devices.jsonl").open("a") as file:
        names = dict.fromkeys(("phase", "device", "note"), evil)
        file.write(json.dumps({**names, "time": START + 700, "used_bytes": 5, "throttled": [evil]}) + "\n")
    text, _ = checked(write_report(run))
    assert "<script" not in text and "&lt;script&gt;" in text and "<title>a&lt;b&amp;c" in text


def test_what_is_torn_or_damaged_is_told_and_the_rest_is_drawn(tmp_path):
    run = write_run(tmp_path / "run", 300)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "loss": NaN, "time": "later", "accuracy_per_slot": 3}\n[1, 2]\n{"step": 302, "lo')
    (run / "receipt.json").write_text("{")
    (run / "warmup.json").write_text('{"mode": "graph"}')
    (run / "buckets.json").write_text('{"buckets": [{"rows": 1}], "rows_per_bucket": [1], "lengths": {}}')
    (run / "profile.toml").write_bytes(b"\xff = [")
    text, drawings = checked(write_report(run))
    assert len(drawings) == 7 + 1 + 5
    for said in ("metrics.jsonl: 2 lines are torn", "receipt.json cannot be read", "profile.toml cannot be read"):
        assert said in text
    assert text.count("A part cannot be drawn from the files of this run") == 2  # evidence, buckets
    assert "no receipt yet" in text


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    (tmp_path / "profile.toml").write_text("[run]\nsteps = 10\n")
    text, drawings = checked(write_report(tmp_path))
    assert not drawings and "no receipt yet" in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "accuracy_per_slot": [null, 0.5], "time": 1.0}\n')
    text, drawings = checked(write_report(tmp_path))
    assert len(drawings) == 3 and "Step 1 of 10." in text


def test_real_acceptance_is_drawn_beside_the_simulated(tmp_path):
    run = write_run(tmp_path / "run", 60, block_size=4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, real in ((lines[19], 1.25), (lines[59], 1.75)):
        line |= {"real_acceptance": real, "real_acceptance_per_slot": [0.5, None, 0.125]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, _ = checked(write_report(run))
    assert "run, real at 20: 1.25" in text and "run, real at 60: 1.75" in text
    assert "run, real 1: 0.5<" in text and "run, real 3: 0.125<" in text and "run, real 2:" not in text


def test_two_runs_are_drawn_side_by_side_with_what_differs(tmp_path):
    first, second = write_run(tmp_path / "first", 400), write_run(tmp_path / "second", 200, seed=1)
    alone, _ = checked(write_report(first))
    text, _ = checked(write_report(first, second))
    assert "first against second" in text and text.count("stroke-dasharray") > alone.count("stroke-dasharray") == 0
    assert "<td>run.seed</td><td class=text>0</td><td class=text>1</td>" in text
    assert "<td>optim.lr</td>" not in text and "<td>steps</td><td>400</td><td>200</td>" in text


def test_memory_that_moved_is_told_with_its_phase_and_time(tmp_path):
    run = write_run(tmp_path / "run", 300)
    write_devices(run / "devices.jsonl", 2, 300, Random(0), moves=True)
    text, _ = checked(write_report(run))
    assert "cuda:0: flat: 0 MiB over 8 minutes" in text
    assert "cuda:1: moved by 3.0 MiB in the steady phase of 8 minutes, first after 5 minutes" in text


def test_the_pause_before_a_resume_is_neither_a_stall_nor_a_slow_step(tmp_path):
    run, lines, devices = tmp_path / "run", [], []
    run.mkdir()
    for first, began in ((1, START), (51, START + 90_000)):
        devices += [{"time": began, "phase": "warm-up", "event": "start"}]
        devices += [{"time": began + 60, "phase": "steady", "event": "phase"}]
        lines += [
            {"step": first + i, "real_tokens": 1000, "time": began + 60 + 0.5 * (i + 1), "loss": 1.0} for i in range(50)
        ]
    for name, content in (("metrics.jsonl", lines), ("devices.jsonl", devices)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    record = read_run(run)
    assert record.stalled == 0 and record.usual_seconds == pytest.approx(0.5)
    assert min(p.low for p in record.tokens_per_s.points) == pytest.approx(2000)
    assert [phase[2] for phase in record.phases] == ["warm-up", "steady", "warm-up", "steady"]
    assert record.phases[-1][1] < 3  # minutes: the day between is left out


def test_the_command_writes_it_again_and_refuses_what_is_no_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", 50)
    assert main(["report", str(run), "--against", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(run / "report.html")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(UsageError):
        write_report(run, tmp_path)


def numbers_of_the_y_axis(drawing):
    return re.findall(r'<text class="y"[^>]*>([^<]*)</text>', drawing)


def test_an_axis_says_no_number_twice_and_bars_of_zeros_stand_on_zero():
    plot = Plot("acceptance", "step", "tokens")
    near = ((1.0, 1.0001), (1.0, 1.0025), (1000, 1002.2), (1000, 1010.2))
    for values in (*near, (12.50, 12.63), (16.40, 16.41), (1e-4, 1.2e-4), (1e-4, 1e-4), (1e12, 1.1e12)):
        points = [Point(step, value, value, value) for step, value in enumerate(values)]
        shown = numbers_of_the_y_axis(line_plot(plot, [Line("run", points)]))
        assert len(shown) >= 3 and len(set(shown)) == len(shown) and max(map(len, shown)) <= 9, shown
    assert numbers_of_the_y_axis(bar_plot(plot, ["1", "2"], [("run", [0.0, 0.0])]))[0] == "0"
    assert "0" in numbers_of_the_y_axis(bar_plot(plot, ["1", "2"], [("run", [-5.0, -1.0])]))


EXTREMES = [0.0, 1.0, 1e20, 1e20 + 2e4, 5e-324, 1e-310, 1e308, -1e308, 1e300, 7e-5]


@pytest.mark.parametrize("zero", [False, True])
def test_a_plot_of_extreme_figures_is_drawn_with_finite_places(zero):
    for x0, x1, y0, y1 in itertools.product(EXTREMES, repeat=4):
        points = [Point(min(x0, x1), y0, y0, y0), Point(max(x0, x1), y1, y1, y1)]
        drawn = line_plot(Plot("t", "x", "y", from_zero=zero), [Line("a", points)])
        assert "nan" not in drawn and "inf" not in drawn, (x0, x1, y0, y1)
