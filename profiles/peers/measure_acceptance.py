"""What drafters of the embedded target are worth, from its own answers: trained beside SpecForge's; by drafter.reuse at
equal seconds; and as good as minutes make them, by chains and by trees. Each command in a process of its own.

    pip install --no-deps specforge==0.2.0
    python profiles/peers/measure_acceptance.py DATA --out OUT

DATA holds alpaca_en.json (hiyouga/LLaMA-Factory) and prompts/gsm8k.jsonl, mt-bench.jsonl, math500.jsonl
(deepseek-ai/DeepSpec). Trained on: answers to alpaca_en and to the first 1,000 of gsm8k. Held out: the rest of gsm8k,
and the other sets. OUT gets acceptance.json as soon as there is anything in it, and everything that was trained.
"""

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from draftgraph.profiles.measure import receipt, write_receipt

HERE = Path(__file__).parent
GSM8K_TRAINED = 1000
HELD_OUT = ("gsm8k-rest.jsonl", "mt-bench.jsonl", "math500.jsonl")
REUSES = (1, 2, 4)


def done(*words: object) -> list[str]:
    """Run a program of this Python; the lines it printed.

    Raises:
        SystemExit: it failed; its own error is above.
    """
    command = [sys.executable, *map(str, words)]
    print("+", *command[1:], file=sys.stderr, flush=True)
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        sys.exit(f"ended with status {found.returncode}: {' '.join(command)}")
    return found.stdout.splitlines()


def draftgraph(*words: object) -> dict[str, Any]:
    """The summary of a command."""
    return json.loads(done("-m", "draftgraph.engine.cli", *words, "--json")[-1])


def first_lines(source: Path, count: int | None) -> list[str]:
    with source.open() as file:
        return list(islice(file, count))


class Measurement:
    """One folder, one profile; `ours` grows with every part and is on the disk after it."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.ours: dict[str, Any] = {}
        self.peer: dict[str, Any] | None = None
        self.shards = self.out / "shards"
        self.sets = ["human-eval", *(self.out / name for name in HELD_OUT)]

    def keep(self, part: str, figures: Any) -> None:
        self.ours[part] = figures
        made = receipt("acceptance", self.args.profile, ours=self.ours, peer=self.peer)
        write_receipt(self.out / "acceptance.json", made)

    def settings(self, **values: object) -> list[str]:
        """What --set takes, after the user's own."""
        always = {"data.shards": self.shards.resolve(), "eval.every": 0, "checkpoint.every": 0}
        return ["--set", *self.args.assignments, *(f"{k}={v}" for k, v in (always | values).items())]

    def data(self) -> None:
        """Split the prompts, let the target answer them, and make shards of the answers."""
        args, given = self.args, Path(self.args.data)
        gsm8k = first_lines(given / "prompts" / "gsm8k.jsonl", None)
        (self.out / HELD_OUT[0]).write_text("".join(gsm8k[GSM8K_TRAINED:]))
        for name in HELD_OUT[1:]:
            (self.out / name).write_text("".join(first_lines(given / "prompts" / name, None)))
        alpaca = json.loads((given / "alpaca_en.json").read_text())[: args.limit]
        asked = self.out / "asked.jsonl"
        asked.write_text("".join([json.dumps(row) + "\n" for row in alpaca] + gsm8k[: args.limit or GSM8K_TRAINED]))
        answers = []
        for sample in range(args.samples):
            answers.append(self.out / f"answers-{sample}.jsonl")
            how = ["--temperature", 0.8, "--seed", sample] if sample else []
            sizes = ["--max-new-tokens", args.answer_tokens, "--batch-size", args.batch_size]
            draftgraph("regenerate", asked, "--target", "smollm2", "--out", answers[-1], *sizes, *how)
        made = ["--target", "smollm2", "--out", self.shards, "--block-size", 8, "--max-context", 512]
        prepared = draftgraph("prepare", *answers, *made)
        figures = {key: prepared[key] for key in ("rows_used", "tokens", "supervised_tokens")}
        self.keep("data", {"samples": args.samples, "answer_tokens": args.answer_tokens, **figures})

    def beside(self) -> None:
        """The same training by both engines."""
        folder = self.out / "beside"
        sizes = ["--num-prompts", self.args.num_prompts, "--new-tokens", self.args.new_tokens, "--out", folder]
        settings = self.settings(**{"run.steps": self.args.steps, "drafter.reuse": 1, "optim.accumulate": 1})
        script = HERE / "train_beside_specforge.py"
        done(script, self.args.profile, *settings, "--prompts", *self.sets, *sizes)
        found = json.loads((folder / "receipt.json").read_text())
        self.peer = found["peer"]
        self.keep("beside", {**found["ours"], "seconds_of_the_peer_over_ours": found["ratio"]})

    def trained(self, name: str, reuse: int, seconds: float) -> dict[str, Any]:
        """A drafter trained for about so many seconds: as many steps as `plan` expects in them."""
        warm = ["--warmup", self.out / "beside" / "run" / "warmup.json"]
        expected = draftgraph("plan", self.args.profile, *self.settings(**{"drafter.reuse": reuse}), *warm)
        steps = max(1, round(1e3 * seconds / expected["step_ms"]))
        settings = self.settings(**{"drafter.reuse": reuse, "run.steps": steps})
        summary = draftgraph("train", self.args.profile, "--run", self.out / name, *settings)
        return {key: summary[key] for key in ("steps", "seconds", "loss_last", "real_tokens_per_s")}

    def accepted(self, name: str, *options: object) -> dict[str, Any]:
        """By set, and whether answers are those of the target."""
        sizes = ["--num-prompts", self.args.num_prompts, "--max-new-tokens", self.args.new_tokens]
        return draftgraph("eval", self.out / name, "--prompts", *self.sets, *sizes, *options)

    def reuse(self) -> int:
        """Acceptance by drafter.reuse at equal seconds; the best one."""
        rows = []
        for reuse in REUSES:
            figures = self.trained(f"reuse-{reuse}", reuse, self.args.reuse_seconds)
            found = self.accepted(f"reuse-{reuse}")
            sets = {Path(row["name"]).stem: row["acceptance"] for row in found["sets"]}
            rows.append({"reuse": reuse, **figures, "acceptance": found["acceptance"], "sets": sets})
            self.keep("reuse", rows)
        return max(rows, key=lambda row: row["acceptance"])["reuse"]

    def best(self, reuse: int) -> None:
        """As good as the minutes make it, by chains and by trees."""
        figures = self.trained("best", reuse, self.args.best_seconds)
        self.keep("best", {"reuse": reuse, **figures, "evaluation": self.accepted("best", "--tree", 64)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--profile", default="smollm2-gpu")
    parser.add_argument("--set", dest="assignments", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--out", default="acceptance")
    parser.add_argument("--samples", type=int, default=4, help="answers to every prompt, the first one greedy (4)")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=500, help="prompts answered at once (500)")
    parser.add_argument("--steps", type=int, default=1000, help="of the training beside SpecForge's (1000)")
    parser.add_argument("--reuse-seconds", type=float, default=60.0)
    parser.add_argument("--best-seconds", type=float, default=240.0)
    parser.add_argument("--num-prompts", type=int, default=16, help="of every held-out set (16)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, help="prompts of each kind to train on, for a trial")
    measurement = Measurement(parser.parse_args())
    measurement.data()
    measurement.beside()
    measurement.best(measurement.reuse())
    print(json.dumps(measurement.ours, indent=1))


if __name__ == "__main__":
    main()
