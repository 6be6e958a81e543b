"""The loss of the fast path beside that of the plain one, and beside what another seed changes.

The plain path: the target's own module, and every kernel of the drafter, its loss and its optimizer replaced by its
PyTorch twin; the same weights, rows and anchors. Each training is a process and a run folder of its own. Writes a
receipt; exit status 1 where the plain path is further from the fast one than another seed is.

    python profiles/peers/plain_path.py smollm2-gpu --steps 200 --fp8
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from draftgraph.profiles.measure import receipt, write_receipt

WINDOW = 20  # steps whose mean loss is one row of the table: a single step's depends on its rows
RESULTS = Path(__file__).parents[1] / "results"


def use_twins() -> None:
    """Replace the kernels of the drafter, the loss and the optimizer by their PyTorch twins, in this process."""
    from draftgraph.engine.models import drafter, loss
    from draftgraph.engine.run import optimizer
    from draftgraph.kernels import reference

    for module, name in ((drafter, "fused"), (loss, "cross_entropy_kernels"), (optimizer, "fused")):
        assert hasattr(module, name)
        setattr(module, name, reference)


def losses(run: Path) -> list[float]:
    """The loss of every step of a run, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def windows(values: list[float]) -> list[float]:
    """The mean of every WINDOW steps; what is left over at the end is left out."""
    size = min(WINDOW, len(values))
    return [sum(values[i : i + size]) / size for i in range(0, len(values) - size + 1, size)]


def compare(runs: dict[str, list[float]]) -> dict[str, Any]:
    """The windows of every variant, and how far each is from "fast": mean and largest |difference| over windows."""
    found: dict[str, Any] = {"window_steps": WINDOW, "loss": {name: windows(values) for name, values in runs.items()}}
    fast = found["loss"]["fast"]
    found["difference"] = {}
    for name, values in found["loss"].items():
        apart = [abs(a - b) for a, b in zip(values, fast, strict=True)]
        found["difference"][name] = {"mean": sum(apart) / len(apart), "largest": max(apart)}
    found["agrees"] = found["difference"]["plain"]["mean"] <= found["difference"]["another seed"]["mean"]
    return found


def table(found: dict[str, Any]) -> str:
    names = list(found["loss"])
    lines = ["  ".join(f"{name:>12}" for name in ("steps", *names))]
    for i, row in enumerate(zip(*found["loss"].values(), strict=True)):
        steps = f"{i * found['window_steps'] + 1}-{(i + 1) * found['window_steps']}"
        lines.append("  ".join([f"{steps:>12}", *(f"{value:12.4f}" for value in row)]))
    for kind in ("mean", "largest"):
        cells = (f"{found['difference'][name][kind]:12.4f}" for name in names)
        lines.append("  ".join([f"{kind + ' diff.':>12}", *cells]))
    return "\n".join(lines)


def variants(profile: str, assignments: list[str], steps: int, fp8: bool) -> dict[str, list[str]]:
    """Name -> assignments of every training. None evaluates: a target in FP8 could not."""
    from draftgraph.engine.config import load_profile

    always = [f"run.steps={steps}", "checkpoint.every=0", "eval.every=0", *assignments]
    seed = load_profile(profile, assignments).run.seed
    own = {"fast": [], "plain": ["target.forward=module"], "another seed": [f"run.seed={seed + 1}"]}
    if fp8:
        own["fp8 target"] = ["target.precision=fp8"]
    return {name: [*always, *changes] for name, changes in own.items()}


def train(profile: str, run: Path, plain: bool, assignments: list[str]) -> None:
    command = [sys.executable, "-P", __file__, profile, "--set", *assignments, "--train", str(run)]
    subprocess.run([*command, *(["--plain"] if plain else [])], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fp8", action="store_true", help="also with the target's products in FP8")
    parser.add_argument("--out", type=Path, help="receipt (profiles/results/loss-PROFILE.json)")
    parser.add_argument("--set", dest="assignments", nargs="+", default=[])
    parser.add_argument("--train", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        from draftgraph.engine.cli import main as draftgraph

        if args.plain:
            use_twins()
        return draftgraph(["train", args.profile, "--run", args.train, "--set", *args.assignments])
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, assignments in variants(args.profile, args.assignments, args.steps, args.fp8).items():
            run = Path(folder) / name.replace(" ", "-")
            train(args.profile, run, name == "plain", assignments)
            runs[name] = losses(run)
    found = compare(runs)
    print(table(found))
    out = args.out or RESULTS / f"loss-{Path(args.profile).stem}.json"
    write_receipt(out, receipt("loss", args.profile, ours={"steps": args.steps, **found}))
    print(f"the paths {'agree' if found['agrees'] else 'DISAGREE'}; {out}")
    return 0 if found["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
