"""The command line: `draftgraph COMMAND ...`. It parses, calls one function per command, and prints its summary.

Exit status: 0 done; 2 usage or profile; 3 data; 4 capture or verification; 5 run failed; 130 interrupted.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import metadata

from rich.console import Console
from rich.text import Text

from draftgraph.engine.bench.goals import WORKLOADS
from draftgraph.engine.commands import (
    bench,
    demo,
    evaluate,
    export,
    plan,
    prepare,
    regenerate,
    report,
    trace,
    train,
    warmup,
)
from draftgraph.engine.data.anchors import RULES
from draftgraph.engine.data.formats import FORMS
from draftgraph.engine.data.masks import TURNS
from draftgraph.engine.data.template import MASKS
from draftgraph.engine.errors import DraftgraphError, RunError, UsageError


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"takes a number above 0, found {value}")
    return value


def row_numbers(text: str) -> list[int]:
    """Numbers from 0 on, commas between them."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"takes numbers of rows, such as 17,24, found {text}")
    return [int(part) for part in text.split(",")]


def budget(text: str) -> int:
    value = int(text)
    if not 16 <= value <= 256:
        raise argparse.ArgumentTypeError(f"takes a number of nodes from 16 to 256, found {value}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"takes a share from 0 to 1, found {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The whole interface; tests/test_cli.py freezes it."""
    top = argparse.ArgumentParser(
        prog="draftgraph",
        description="Train DFlash drafters with a fixed-shape, CUDA-graph engine.",
        epilog="A first run: draftgraph demo. Every command: draftgraph COMMAND --help.",
    )
    top.add_argument("--version", action="version", version=metadata.version("draftgraph"))
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, help: str, epilog: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=help, description=help, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.set_defaults(command_function=run)
        sub.add_argument("--json", action="store_true", help="print the summary as one JSON object, last on stdout")
        return sub

    def add_profile(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("profile", metavar="PROFILE", help="path to a TOML file, or the name of a shipped profile")
        sub.add_argument("--run", metavar="DIR", help="run folder (default: runs/PROFILE)")
        add_assignments(sub)

    def add_assignments(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--set",
            dest="assignments",
            metavar="section.key=value",
            action="extend",
            nargs="+",
            default=[],
            help="override keys of the profile",
        )

    sub = add(
        "prepare",
        prepare,
        "read conversations, apply the chat template, write token shards",
        "example: draftgraph prepare chats.jsonl --target smollm2 --show 3\n"
        "         draftgraph prepare chats.jsonl --target smollm2 --out shards/chats",
    )
    sub.add_argument("inputs", nargs="+", metavar="FILE", help="files of conversations, or folders of them")
    sub.add_argument("--target", required=True, metavar="MODEL", help="smollm2, a folder or a hub name")
    sub.add_argument("--out", metavar="DIR", help="shard folder to write")
    sub.add_argument(
        "--max-context", type=positive, default=4096, metavar="TOKENS", help="longer rows are cut (%(default)s)"
    )
    sub.add_argument(
        "--block-size", type=positive, default=16, metavar="K", help="shorter rows are left out (%(default)s)"
    )
    sub.add_argument("--format", choices=FORMS, help="the form of every row (default: each row's keys tell)")
    sub.add_argument(
        "--mask", choices=MASKS, default=MASKS[0], help="how the assistant's turns are found (%(default)s)"
    )
    sub.add_argument(
        "--turns", choices=TURNS, default=TURNS[0], help="the assistant's turns that are supervised (%(default)s)"
    )
    for name in ("thinking", "tool-calls"):
        sub.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=f"supervise {name.replace('-', ' ')}"
        )
    sub.add_argument("--show", type=positive, metavar="N", help="print the first N used rows, supervised tokens marked")
    sub.add_argument(
        "--show-rows",
        type=row_numbers,
        metavar="N,...",
        help="print these rows of a shard folder, which FILE names, as a training run tells them",
    )
    sub.add_argument(
        "--max-bad-rows", type=share, default=1.0, metavar="SHARE", help="stop where more are skipped (%(default)s)"
    )
    sub.add_argument("--strict", action="store_true", help="stop at the first row that would be skipped")
    sub.add_argument("--anchor-rule", choices=RULES, default=RULES[0], help="(%(default)s)")
    sub.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes (default: one a core, fewer for small files)",
    )

    sub = add(
        "plan",
        plan,
        "without a GPU: buckets, padding, memory, predicted milliseconds and tokens/s, the best use of 2 to 64 devices",
        "example: draftgraph plan qwen3.6-27b-8gpu --timeline plan.svg\n"
        "         draftgraph plan qwen3.6-27b-8gpu --gpu h100 --set drafter.reuse=2",
    )
    add_profile(sub)
    sub.add_argument("--gpu", metavar="CARD", help="h200, h100, b200, a100-80gb, ... (default: the warm-up's or h200)")
    sub.add_argument(
        "--warmup", metavar="FILE", help="a warmup.json, whose times replace estimates (default: the run folder's)"
    )
    sub.add_argument("--timeline", metavar="FILE", help="draw the simulated schedule of two steps: .svg")
    sub.add_argument(
        "--picture", metavar="FILE", help="draw the row lengths and the buckets' edges: .svg or .png (extra `data`)"
    )

    sub = add(
        "warmup",
        warmup,
        "warm up, capture and verify every graph of a profile; print the evidence",
        "example: draftgraph warmup smollm2-gpu --set buckets.count=4",
    )
    add_profile(sub)

    sub = add(
        "train",
        train,
        "warm up, then train; writes the run folder",
        "example: draftgraph train smollm2-gpu --run runs/first\n"
        "         draftgraph train smollm2-gpu --run runs/first --resume",
    )
    add_profile(sub)
    sub.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint of the run folder")

    sub = add(
        "trace",
        trace,
        "trace a few steady steps: time per range and kernel family, idle gaps, host calls; with nsys where it is",
        "example: draftgraph trace smollm2-gpu --steps 5",
    )
    add_profile(sub)
    sub.add_argument("--steps", type=positive, default=5, metavar="N", help="steps to trace (%(default)s)")
    sub.add_argument("--node", action="store_true", help="nsys: every kernel of a graph, not the graph as a whole")

    sub = add(
        "report",
        report,
        "write a run's report.html again, also while it goes on, or beside another run",
        "example: draftgraph report runs/first\n         draftgraph report runs/first --against runs/second",
    )
    sub.add_argument("source", metavar="RUN", help="run folder")
    sub.add_argument("--against", metavar="RUN", help="another run folder, drawn beside it")

    sub = add(
        "eval",
        evaluate,
        "speculative decoding with a drafter: acceptance length, and output compared with plain greedy decoding",
        "example: draftgraph eval runs/first --prompts human-eval questions.jsonl --untrained",
    )
    sub.add_argument("source", metavar="RUN", help="run folder or exported drafter")
    sub.add_argument(
        "--best", action="store_true", help="the run's checkpoint of the best real acceptance, not the newest"
    )
    sub.add_argument("--target", metavar="MODEL", help="needed for an exported drafter")
    sub.add_argument(
        "--prompts",
        nargs="+",
        default=["human-eval"],
        metavar="SET",
        help="sets of prompts: human-eval, .jsonl or .txt files (human-eval)",
    )
    sub.add_argument("--num-prompts", type=positive, default=16, help="the first N of each set (%(default)s)")
    sub.add_argument("--max-new-tokens", type=positive, default=64, help="per prompt (%(default)s)")
    sub.add_argument("--batch-size", type=positive, default=8, metavar="N", help="prompts at once (%(default)s)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    sub.add_argument("--tree", type=budget, metavar="BUDGET", help="draft trees of 16 to 256 nodes as well (DDTree)")
    sub.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="(default: on a GPU what the run trained with, else float32)"
    )
    sub.add_argument("--untrained", action="store_true", help="evaluate the run's drafter of before step 1 as well")

    sub = add(
        "export",
        export,
        "write a drafter for z-lab's code, SGLang, vLLM and speculators, with a model card",
        "example: draftgraph export runs/first --out drafter",
    )
    sub.add_argument("source", metavar="RUN", help="run folder or exported drafter")
    sub.add_argument(
        "--best", action="store_true", help="the run's checkpoint of the best real acceptance, not the newest"
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    sub.add_argument(
        "--format",
        choices=["zlab", "speculators"],
        default="zlab",
        help="zlab: z-lab's code, SGLang, vLLM; speculators: that library, vLLM (%(default)s)",
    )
    sub.add_argument("--target", metavar="MODEL", help="needed for an exported drafter")

    sub = add(
        "regenerate",
        regenerate,
        "let the target answer prompts, here or on a server: training rows in its own words",
        "example: draftgraph regenerate prompts.jsonl --target smollm2 --out answers.jsonl\n"
        "         draftgraph regenerate chats.jsonl --target MODEL --out answers.jsonl --server http://localhost:8000",
    )
    sub.add_argument("prompts", metavar="FILE", help="prompts, or conversations whose last answer is replaced")
    sub.add_argument("--target", required=True, metavar="MODEL", help="smollm2, a folder or a hub name")
    sub.add_argument("--out", required=True, metavar="FILE", help="JSON lines of messages; goes on where it stopped")
    sub.add_argument("--max-new-tokens", type=positive, default=160, help="per answer (%(default)s)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(%(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="of sampled answers (%(default)s)")
    sub.add_argument("--batch-size", type=positive, default=16, help="prompts at once, without a server (%(default)s)")
    server = sub.add_argument_group("a server that speaks OpenAI's chat completions: vLLM, SGLang, ...")
    server.add_argument("--server", metavar="URL", help="as http://localhost:8000; nothing is loaded here")
    server.add_argument("--server-model", metavar="NAME", help="the target's name there (default: MODEL)")
    server.add_argument("--concurrency", type=positive, default=8, metavar="N", help="requests at once (%(default)s)")
    server.add_argument("--timeout", type=positive, default=600, metavar="S", help="seconds of silence (%(default)s)")
    server.add_argument("--retries", type=positive, default=8, metavar="N", help="per prompt (%(default)s)")
    server.add_argument("--api-key-env", metavar="NAME", help="variable that holds the key (default: OPENAI_API_KEY)")

    listed = "\n".join(f"  {name:14}{what}" for name, what in WORKLOADS.items())
    sub = add(
        "bench",
        bench,
        "measure named workloads beside their peers and floors; writes a receipt each",
        f"workloads:\n{listed}\nexample: draftgraph bench attention cross-entropy --quick",
    )
    sub.add_argument("workloads", nargs="+", metavar="WORKLOAD", choices=list(WORKLOADS), help="see below")
    sub.add_argument("--out", default="bench", metavar="DIR", help="folder of the receipts (%(default)s)")
    sub.add_argument("--quick", action="store_true", help="fewer rows and cases")
    sub.add_argument(
        "--peer-rows",
        type=positive,
        nargs="+",
        metavar="ROWS",
        help="of the peer's micro-steps, in w27-var and w08-var",
    )
    sub.add_argument(
        "--peer-from",
        metavar="DIR",
        help="take the peer's figures from receipts of the same GPU there, for a variant (--set target.precision=fp8)",
    )
    add_assignments(sub)

    sub = add(
        "demo",
        demo,
        "prepare, plan, train, evaluate before and after, export: all of it on a small real model",
        "Uses the GPU where there is one (profile smollm2-gpu), else the CPU (profile smollm2-cpu).",
    )
    sub.add_argument("--run", metavar="DIR", help="run folder (default: runs/demo)")
    return top


def stop(number: int, _: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(arguments)
    console = Console(stderr=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read at import; our bar is the only one
    # Outside a run, where nothing is left to write, SIGTERM ends a command as SIGINT does; `train` handles both.
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        return run(args, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def run(args: argparse.Namespace, console: Console) -> int:
    """One command, with what it says at its end; returns the exit status."""
    try:
        if empty := [n for n, v in vars(args).items() if v == "" or (isinstance(v, list) and "" in v)]:
            raise UsageError(f"{empty[0].replace('_', '-')} is empty; give it a value, or leave it out")
        summary = args.command_function(args, console)
    except DraftgraphError as error:
        console.print(Text.assemble(("error: ", "bold red"), str(error)))
        return error.exit_status
    except OSError as error:
        # A full disk, a folder that may not be written: whatever a command was writing, its older version is whole.
        where = f": {error.filename}" if error.filename else ""
        console.print(Text.assemble(("error: ", "bold red"), f"{error.strerror or error}{where}; free or change it"))
        return RunError.exit_status
    if args.json:
        print(json.dumps(summary))
    elif args.command != "demo":  # which tells its own story
        from draftgraph.engine.show import summary_table

        flat = {k: v for k, v in summary.items() if not isinstance(v, list | dict) or k in ("rows_skipped", "split")}
        Console().print(summary_table(f"draftgraph {args.command}", flat))
    return 0


if __name__ == "__main__":
    sys.exit(main())
