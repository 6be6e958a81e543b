"""Draw the live panel of a finished run as it stood at its last step: python draw_panel.py RUN OUT.svg

The figures are those of the run folder: metrics.jsonl, devices.jsonl, receipt.json.
"""

import io
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from draftgraph.engine.run.flatness import Flatness
from draftgraph.engine.run.panel import View


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(run: Path, out: Path) -> None:
    ours = json.loads((run / "receipt.json").read_text())["ours"]
    flatness, samples = Flatness(), {}
    for line in lines_of(run / "devices.jsonl"):
        flatness.add(line)
        if "device" in line and line["phase"] == "steady":
            samples[line["device"]] = line
    last = lines_of(run / "metrics.jsonl")[-1]
    view = View(
        title=run.resolve().name,
        total=ours["steps"],
        first_step=ours["first_step"],
        padding=ours["padding_efficiency"],
        devices=lambda: samples,
        sentences=flatness.sentences,
        step=last["step"],
        loss=ours["loss_last"],
        acceptance=ours["acceptance_after"],
        real_acceptance=ours.get("real_acceptance"),
        tokens_per_s=ours["real_tokens_per_s"],
        skipped=last["skipped"],
        started=time.monotonic() - ours["seconds"],
    )
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(view)
    out.write_text(console.export_svg(title="draftgraph train"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
