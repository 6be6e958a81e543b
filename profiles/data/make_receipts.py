"""Makes the receipts of `profiles/results` that need a GPU, by name.

    python profiles/data/make_receipts.py --list
    python profiles/data/make_receipts.py run-0.8b kernels --out receipts

Each is made by commands of its own processes, under a time limit, in a working folder; what they print goes to
OUT/NAME.log. Receipts are copied to OUT as soon as they are there, run folders without what is large at the end of a
part, whether it went well or not. Exit status 1 where one failed. Where the sources are no git checkout,
DRAFTGRAPH_COMMIT says which commit they are. The peers need `pip install --no-deps specforge==0.2.0`, `demo` the extra
of that name.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent
# Of a run folder, left behind; steps.* are recordings of whole traces.
LARGE = ("checkpoints", "*.safetensors", "wandb", "tensorboard", "shards", "steps.*")


@dataclass(frozen=True)
class Part:
    """Args:
    seconds: after which its commands are ended; on one NVIDIA H200 they are expected to take about half of it.
    commands: what follows `draftgraph`, or a script of this folder's parent, one after the other; {out} is the folder
        of the receipts.
    """

    about: str
    seconds: int
    commands: tuple[str, ...]


PARTS = {
    "kernels": Part(
        "attention, cross-entropy and optimizer beside their peers and floors",
        420,
        ("bench attention cross-entropy optimizer",),
    ),
    "27b": Part("extraction and full rows at 27B shapes", 760, ("bench target w27-full",)),
    "27b-var": Part("rows of every length at 27B shapes", 1200, ("bench w27-var",)),
    "27b-fp8": Part(
        "full rows with the target in FP8, beside the peer of 27b",
        500,
        ("bench target w27-full --peer-from {out} --set target.precision=fp8",),
    ),
    "27b-var-fp8": Part(
        "rows of every length with the target in FP8, beside the peer of 27b-var",
        600,
        ("bench w27-var --peer-from {out} --set target.precision=fp8",),
    ),
    "0.8b": Part("rows of every length at 0.8B shapes", 840, ("bench w08-var",)),
    "observers": Part("what watching a run costs", 330, ("bench observers",)),
    "overlap": Part("target and drafter on one GPU, at once or in turn", 560, ("bench overlap",)),
    "run-0.8b": Part(
        "650 steps of qwen3.5-0.8b-1gpu with evaluation and all observers; a second warm-up over its caches",
        580,
        (
            "train qwen3.5-0.8b-1gpu --run run --set run.steps=650 optim.accumulate=1 log.wandb=offline",
            "warmup qwen3.5-0.8b-1gpu --run warmed-again",
        ),
    ),
    "run-smollm2": Part("the demo: 500 steps of smollm2-gpu, acceptance before and after", 400, ("demo --run run",)),
    "trace": Part("host calls of qwen3.5-0.8b-1gpu", 240, ("trace qwen3.5-0.8b-1gpu --run run",)),
    "run-27b": Part(
        "80 steps of qwen3.6-27b-1gpu: the pause of two checkpoints, memory, prediction",
        500,  # checkpoints further apart than one takes to be written: about 40 s
        (
            "train qwen3.6-27b-1gpu --run run --set run.steps=80 checkpoint.every=40 checkpoint.keep=1 "
            "optim.accumulate=1",
        ),
    ),
    "loss": Part(
        "losses of 200 steps of smollm2-gpu: kernels, their PyTorch twins, another seed, FP8",
        400,
        (
            f"prepare {shlex.quote(str(DATA / 'smollm2-code.jsonl'))} --target smollm2 --out runs/demo/shards "
            "--block-size 8 --max-context 512",
            "peers/plain_path.py smollm2-gpu --steps 200 --fp8 --out loss-smollm2-gpu.json",
        ),
    ),
}


def make(name: str, part: Part, out: Path, work: Path) -> str:
    """Run the commands of one part and copy what they made; how it ended, in a few words."""
    folder = work / name
    folder.mkdir()
    ends, status = time.monotonic() + part.seconds, "done"
    with (out / f"{name}.log").open("w") as log:
        for command in part.commands:
            first, *rest = shlex.split(command.replace("{out}", shlex.quote(str(out))))
            program = ["-m", "draftgraph.engine.cli", first]
            if first.endswith(".py"):
                program = ["-P", str(DATA.parent / first)]
            started = [sys.executable, *program, *rest]
            process = subprocess.Popen(
                started, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < ends:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
                copy_receipts(folder, out)
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"ended after {part.seconds} s"
                break
            if process.returncode:
                status = f"status {process.returncode}"
                break
    copy_receipts(folder, out)
    # Of a training, of a warm-up alone, or of a trace.
    for run in {path.parent for path in folder.glob("*/*.json")} - {folder / "bench"}:
        shutil.copytree(run, out / f"{name}-{run.name}", dirs_exist_ok=True, ignore=shutil.ignore_patterns(*LARGE))
    return status


def copy_receipts(folder: Path, out: Path) -> None:
    """Also while a command goes on, of which nothing else may be left."""
    for receipt in [*folder.glob("*.json"), *folder.glob("bench/*.json")]:
        shutil.copy(receipt, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="what there is, and the time limit of each")
    parser.add_argument("--out", type=Path, default=Path("receipts"), help="folder (receipts)")
    args = parser.parse_args()
    if args.list or not args.parts:
        for name, part in PARTS.items():
            print(f"{name:<12} {part.seconds:>4} s  {part.about}")
        return 0
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file; name a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    ended = {}
    with tempfile.TemporaryDirectory() as work:
        for name in args.parts:
            started = time.monotonic()
            print(f"{name}: {PARTS[name].about}", flush=True)
            ended[name] = make(name, PARTS[name], args.out.resolve(), Path(work))
            told = "" if ended[name] == "done" else f", see {args.out / name}.log"
            print(f"{name}: {ended[name]}{told}, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if any(status != "done" for status in ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
