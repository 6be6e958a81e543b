"""Short trainings of random profiles, killed and signalled at random moments: `make soak MINUTES=3`. Not a pytest file.

Every run must end in the bits of its unbroken twin. Beside them one long run goes on, whose memory and handles must
not grow. Before them checkpoints, shards and profiles are fuzzed. Afterwards no process is left. A failure prints its
seed: `soak.py --seed N --rounds 1` repeats it. SIGTERM and Ctrl-C end it after the round, with all its figures.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import tomli_w
from rich.console import Console
from safetensors.torch import load_file
from tiny import ordinary_rows, profile_values
from victim import errors, finish, logged, start, wait_for

from draftgraph.engine.run import checkpoint
from draftgraph.engine.run.host import private_bytes
from draftgraph.engine.show import summary_table
from draftgraph.profiles.measure import receipt, write_receipt

MOST_KILLS = 8  # of one run
# Four tests, which share the number of inputs.
FUZZED = ["test_fuzz_inputs.py", "test_run_checkpoint.py::test_any_change_of_any_file_is_found_or_changes_nothing"]
FUZZ_TESTS = 4


@dataclasses.dataclass
class Counts:
    runs: int = 0
    steps: int = 0
    kills: int = 0
    kills_in_writing: int = 0  # a half written checkpoint was left
    stops: int = 0
    checkpoints_on_request: int = 0
    damaged: int = 0  # the newest checkpoint was damaged between two starts
    lost_steps_max: int = 0  # steps trained again after a kill
    wrong_bits: int = 0


def random_values(folder: Path, dice: random.Random) -> dict:
    """A profile over everything that takes another path on a CPU."""
    targets, drafters = dice.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    look_ahead = dice.choice([1, 2]) if targets + drafters > 2 else dice.choice([0, 0, 1])
    return profile_values(
        folder,
        rows=ordinary_rows(dice.randint(4, 40)),
        run={"steps": dice.randint(4, 16), "seed": dice.randrange(2**31)},
        drafter={"reuse": dice.choice([1, 1, 2, 3]), "loss": dice.choice(["decay", "dpace"])},
        buckets={"count": dice.randint(1, 3)},
        placement={"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "look_ahead": look_ahead},
        optim={"accumulate": dice.randint(1, 3), "warmup": dice.choice([0.0, 0.5])},
        checkpoint={"every": dice.choice([0, 1, 1, 2, 3]), "keep": dice.randint(2, 3)},
        log={"every": dice.randint(1, 4)},
    )


def one_round(folder: Path, seed: int, counts: Counts) -> None:
    """Train one random profile twice: unbroken, and broken at random moments; compare."""
    dice = random.Random(seed)
    values = random_values(folder, dice)
    profile, whole, run = folder / "soak.toml", folder / "whole", folder / "run"
    profile.write_text(tomli_w.dumps(values))
    started = time.monotonic()
    status = finish(start(profile, whole))
    assert status == 0, errors(whole)
    seconds = time.monotonic() - started
    every = values["checkpoint"]["every"] or values["run"]["steps"]
    for _ in range(dice.randint(1, MOST_KILLS)):
        process = start(profile, run, slow_step=0.02, slow_disk=dice.choice([0.0, 0.05, 0.2]))
        process.join(dice.uniform(0.2, 1.5) * seconds)
        kind = dice.choice(["kill", "kill", "kill", "stop", "request"])
        if process.is_alive() and kind == "request" and logged(run) and resumed_far(run):
            os.kill(process.pid, signal.SIGUSR1)
            counts.checkpoints_on_request += 1
            process.join(dice.uniform(0, 0.5))
        if process.is_alive() and kind == "stop":
            os.kill(process.pid, signal.SIGTERM)
            counts.stops += 1
            status = finish(process, within=30)
            # A signal behind the end of the run finds its handlers gone, and everything written.
            complete = (run / "checkpoints" / f"step-{values['run']['steps']:06d}").exists()
            assert status in (0, 130) or (complete and status == -signal.SIGTERM), f"status {status}: {errors(run)}"
        process.kill()
        if finish(process) == 0:
            break
        if process.exitcode == -signal.SIGKILL:
            counts.kills += 1
            counts.kills_in_writing += bool(list((run / "checkpoints").glob(".step-*.partial")))
            # The figures are ahead of the device on no step: what was logged was trained.
            found = checkpoint.found(run / "checkpoints")
            lost = logged(run) - (checkpoint.step_of(found[-1]) if found else 0)
            counts.lost_steps_max = max(counts.lost_steps_max, lost)
            assert lost <= 2 * every + 1, f"{lost} steps lost, a checkpoint every {every}"
            # One is to be left, of a run that may have been damaged before.
            if len(found) > 1 and dice.random() < 0.2 and intact(found[-2]):
                damage(dice.choice(list(found[-1].iterdir())), dice)
                counts.damaged += 1
    if process.exitcode != 0:
        assert finish(start(profile, run)) in (0, 5), errors(run)
    counts.runs += 1
    counts.steps += values["run"]["steps"]
    compare(whole, run, values["run"]["steps"], counts)


def resumed_far(run: Path) -> bool:
    """Its handlers are in place: the loader has started, and it trains."""
    return bool(checkpoint.found(run / "checkpoints"))


def intact(path: Path) -> bool:
    try:
        checkpoint.verify(path)
    except checkpoint.Damage:
        return False
    return True


def damage(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if dice.random() < 0.5:
        path.write_bytes(content[: dice.randrange(len(content))])
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


def compare(whole: Path, run: Path, steps: int, counts: Counts) -> None:
    name = Path("checkpoints") / f"step-{steps:06d}"
    checkpoint.verify(run / name)
    expected, found = load_file(whole / name / checkpoint.STATE), load_file(run / name / checkpoint.STATE)
    wrong = [key for key, tensor in expected.items() if not tensor.equal(found[key])]
    scalars = [json.loads((folder / name / checkpoint.SCALARS).read_text()) for folder in (whole, run)]
    lines = [
        [{k: v for k, v in json.loads(line).items() if k != "time"} for line in file.read_text().splitlines()]
        for file in (whole / "metrics.jsonl", run / "metrics.jsonl")
    ]
    if wrong or expected.keys() != found.keys() or scalars[0] != scalars[1] or lines[0] != lines[1]:
        counts.wrong_bits += 1
        raise AssertionError(f"not the bits of the unbroken run: {wrong or 'figures or position'}")


def processes() -> list[str]:
    """Children of this process and of the fork server, but for the server itself and the tracker."""
    ours = {os.getpid(), forkserver._forkserver._forkserver_pid}
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    quiet = ("resource_tracker", "forkserver", "ps -eo")
    return [args for _, parent, args in rows if int(parent) in ours and not any(word in args for word in quiet)]


def fuzz(count: int, trouble: Counter[str]) -> int:
    """Try `count` broken checkpoints, shards and profiles; returns how many were."""
    here, each = Path(__file__).parent, str(-(-count // FUZZ_TESTS))
    command = [sys.executable, "-m", "pytest", "-q", "--hypothesis-show-statistics", *(str(here / t) for t in FUZZED)]
    result = subprocess.run(command, env={**os.environ, "FUZZ": each}, capture_output=True, text=True)
    if result.returncode != 0:
        trouble["fuzzing failed, see above"] += 1
        print(result.stdout[-8000:], flush=True)
    return sum(map(int, re.findall(r"(\d+) passing,", result.stdout)))


def growth(samples: list[dict[str, int]], key: str) -> float:
    """The share by which a figure of the long run grew."""
    return samples[-1][key] / samples[0][key] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--fuzz", type=int, default=0, help="broken checkpoints, shards and profiles to try first")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: by the clock)")
    parser.add_argument("--receipt", type=Path, default=Path("soak.json"), help="written after every round")
    args = parser.parse_args()
    first = int(time.time()) % 10**6 if args.seed is None else args.seed
    console, counts, trouble = Console(), Counts(), Counter[str]()
    began, number, interrupted = time.monotonic(), 0, []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: interrupted.append(True))
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    long = long_run(home)
    handles = open_handles(os.getpid())
    fuzzed = fuzz(args.fuzz, trouble) if args.fuzz else 0
    samples = [usage(long.pid)]

    def figures() -> dict:
        return {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "first_seed": first,
            **dataclasses.asdict(counts),
            "fuzzed_inputs": fuzzed,
            "failures": sum(trouble.values()),
            "long_run_steps": logged(home / "long"),
            "long_run_memory_growth": growth(samples, "bytes"),
            "long_run_data_process_memory_growth": growth(samples, "data_bytes"),
            "long_run_before": samples[0],
            "long_run_after": samples[-1],
            "handles_before": handles,
            "handles_after": open_handles(os.getpid()),
        }

    while time.monotonic() < began + 60 * args.minutes and number < args.rounds and not interrupted:
        folder = home / str(first + number)
        folder.mkdir()
        try:
            one_round(folder, first + number, counts)
            shutil.rmtree(folder)
        except Exception as error:
            trouble[str(error)] += 1
            console.print(f"seed {first + number}: {error!r} (left in {folder})", markup=False)
        number += 1
        samples.append(usage(long.pid))
        write_receipt(args.receipt, receipt("soak", "random profiles of tests/soak.py", ours=figures()))
    os.kill(long.pid, signal.SIGTERM)
    stopped, newest = finish(long, within=30), checkpoint.newest(home / "long" / "checkpoints").name
    time.sleep(1)  # data processes end by themselves
    left = processes()
    table = {**figures(), "long_run_newest_checkpoint": newest, "processes_left": len(left)}
    write_receipt(args.receipt, receipt("soak", "random profiles of tests/soak.py", ours=table))
    console.print(summary_table("soak", {**table, "receipt": str(args.receipt)}))
    for what in trouble:
        console.print(what, markup=False)
    if not trouble:
        shutil.rmtree(home)
    # A checkpoint that is being written has files open.
    grown = growth(samples, "bytes") > 0.02 or samples[-1]["handles"] > samples[0]["handles"] + 2
    return int(bool(trouble) or bool(left) or grown or stopped != 130 or table["handles_after"] > handles + 2)


def long_run(home: Path):
    """One training that goes on beside the others, past its first checkpoints.

    A checkpoint interns a dozen new strings (names in `Path`). Before Python 3.12 the table of interned strings is
    rebuilt once, 3.7 MiB larger, after 54,400 of them; 100 steps apart, hours of checkpoints stay below that.
    """
    folder = home / "profile"
    folder.mkdir()
    profile = folder / "long.toml"
    values = profile_values(folder, run={"steps": 10**7}, checkpoint={"every": 100}, optim={"warmup": 0.0})
    profile.write_text(tomli_w.dumps(values))
    process = start(profile, home / "long", slow_step=0.01)
    wait_for(lambda: logged(home / "long") > 100, within=120)
    return process


def open_handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def usage(pid: int) -> dict[str, int]:
    """Handles and private bytes of a run, and private bytes of its data process."""
    (data,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"handles": open_handles(pid), "bytes": private_bytes(pid), "data_bytes": private_bytes(int(data))}


if __name__ == "__main__":
    sys.exit(main())
