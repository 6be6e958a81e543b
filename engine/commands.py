"""What each command of the command line does: its arguments in, one call, its summary out."""

import argparse
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftgraph.engine.errors import UsageError

Summary = dict[str, Any]
# NOTE: commands import what they need inside, so that --help and usage errors answer at once.


def prepare(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.data.doctor import report
    from draftgraph.engine.data.masks import Supervision
    from draftgraph.engine.data.prepare import prepare as prepare_rows
    from draftgraph.engine.data.prepare import show_rows
    from draftgraph.engine.data.template import Template
    from draftgraph.engine.data.view import show_shard_rows
    from draftgraph.engine.models.target import load_config, load_tokenizer

    if args.show_rows:
        if len(args.inputs) > 1 or args.out or args.show:
            raise UsageError("prepare: --show-rows takes one shard folder, and neither --out nor --show")
        return show_shard_rows(args.inputs[0], args.show_rows, load_tokenizer(args.target), console)
    if not args.out and not args.show:
        raise UsageError("prepare needs --out DIR to write shards, or --show N or --show-rows N,... to look at rows")
    config = load_config(args.target)
    console.print(f"reading the tokenizer of {args.target}", markup=False)
    supervision = Supervision(args.turns, args.thinking, args.tool_calls)
    template = Template(load_tokenizer(args.target), supervision, args.mask)
    rules = {
        "max_context": args.max_context,
        "block_size": args.block_size,
        "vocab_size": config.vocab_size,
        "anchor_rule": args.anchor_rule,
        "form": args.format,
    }
    if args.show:
        summary = show_rows(args.inputs, template, args.show, console, **rules)
    if args.out:
        limits = {"max_bad_rows": args.max_bad_rows, "strict": args.strict, "workers": args.workers}
        summary = prepare_rows(args.inputs, template, args.out, target=args.target, progress=True, **rules, **limits)
        if not summary["picture"]:
            console.print(
                "no picture of the lengths: it needs the extra `data`: pip install -e '.[data]'", markup=False
            )
    console.print(Text(report(summary)))
    return summary


def plan(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.config import load_profile
    from draftgraph.engine.data.picture import draw_buckets
    from draftgraph.engine.plan import make_plan
    from draftgraph.engine.predict.measured import read_warmup
    from draftgraph.engine.predict.show import show_plan
    from draftgraph.engine.predict.summary import summary

    if args.picture and Path(args.picture).suffix not in (".svg", ".png"):
        raise UsageError(f"plan: --picture takes a file that ends in .svg or .png, found {args.picture}")
    if args.timeline and Path(args.timeline).suffix != ".svg":
        raise UsageError(f"plan: --timeline takes a file that ends in .svg, found {args.timeline}")
    made = make_plan(load_profile(args.profile, args.assignments))
    found = Path(args.warmup) if args.warmup else run_folder(args) / "warmup.json"
    evidence = read_warmup(found) if args.warmup or found.is_file() else None
    values = summary(made, evidence, args.gpu, Path(args.timeline) if args.timeline else None)
    if args.timeline and values["step_ms"] is None:
        raise UsageError(f"plan: --timeline needs times. {' '.join(values['notes'])}")
    if args.picture:
        title = f"{len(made.lengths):,} rows, {values['padding_efficiency']:.3f} of the padded tokens are real"
        if not draw_buckets(made.lengths.tolist(), made.buckets, title, Path(args.picture)):
            raise UsageError("plan: --picture needs the extra `data`: pip install -e '.[data]'")
        values["picture"] = args.picture
    if not args.json:
        show_plan(Console(), values)
    return values


def run_folder(args: argparse.Namespace) -> Path:
    return Path(args.run or Path("runs") / Path(args.profile).stem)


def warmup(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.config import load_profile
    from draftgraph.engine.show import show_warmup
    from draftgraph.engine.train import warmup as warm_up

    evidence = warm_up(load_profile(args.profile, args.assignments), run_folder(args), console)
    show_warmup(console if args.json else Console(), evidence)
    return evidence


def train(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.config import load_profile
    from draftgraph.engine.train import train as run_training

    return run_training(load_profile(args.profile, args.assignments), run_folder(args), args.resume, console)


def trace(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.trace import Request
    from draftgraph.engine.trace import trace as trace_steps

    return trace_steps(Request(args.profile, args.assignments, run_folder(args), args.steps, args.node), console)


def report(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.report.page import write_report

    against = Path(args.against) if args.against else None
    return {"report": str(write_report(Path(args.source), against))}


def evaluate(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.progress import teller
    from draftgraph.engine.saved import EvalOptions, evaluate_saved, keep_evaluation, load_saved
    from draftgraph.engine.show import show_evaluation

    if not 0 <= args.temperature < math.inf:
        raise UsageError(f"--temperature takes a number from 0 (greedy), found {args.temperature}")
    if args.temperature and args.tree:
        raise UsageError("--tree decodes greedily; leave --temperature away")
    say = teller(console)
    saved = load_saved(Path(args.source), say, best=args.best)
    options = EvalOptions(
        args.prompts,
        args.num_prompts,
        args.max_new_tokens,
        args.batch_size,
        args.temperature,
        args.tree or 0,
        args.dtype or "",
        args.untrained,
    )
    summary = evaluate_saved(saved, args.target or "", options, console)
    keep_evaluation(Path(args.source), saved, summary, say)
    show_evaluation(console, summary)
    return summary


def export(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.models.export import export_drafter
    from draftgraph.engine.models.target import load_config
    from draftgraph.engine.progress import teller
    from draftgraph.engine.run.loggers import log_export
    from draftgraph.engine.saved import card_facts, load_saved

    source = Path(args.source)
    saved = load_saved(source, teller(console), best=args.best)
    target = args.target or saved.target
    if not target:
        raise UsageError(f"{args.source} does not name its target; add --target MODEL")
    facts = card_facts(source, saved, target)
    summary = export_drafter(Path(args.out), saved.drafter, load_config(target), form=args.format, card=facts)
    if told := log_export(source, Path(args.out)):
        console.print(told, markup=False)
    return summary


def regenerate(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.data.answers import Answerer, Sampling
    from draftgraph.engine.data.regenerate import regenerate as answer_prompts

    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    answerer: Answerer
    if args.server:
        from draftgraph.engine.data.server import Server, api_key

        answerer = Server(
            args.server,
            args.target,
            args.server_model or args.target,
            sampling,
            key=api_key(args.api_key_env),
            concurrency=args.concurrency,
            timeout=args.timeout,
            retries=args.retries,
        )
    else:
        import torch

        from draftgraph.engine.data.local_target import LocalTarget
        from draftgraph.engine.models.target import load_model, load_tokenizer
        from draftgraph.engine.saved import default_device

        console.print(f"loading {args.target}", markup=False)
        model = load_model(args.target, torch.float32, default_device())
        answerer = LocalTarget(args.target, model, load_tokenizer(args.target), sampling, args.batch_size)
    summary = answer_prompts(args.prompts, answerer, Path(args.out), progress=True)
    for reason, example in summary["examples"].items():
        console.print(f"skipped: {summary['rows_skipped'][reason]} {reason}, the first {example}", markup=False)
    return summary


def demo(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.demo import demo as run_demo

    return run_demo(Path(args.run or "runs/demo"), console)


def bench(args: argparse.Namespace, console: Console) -> Summary:
    from draftgraph.engine.bench.command import bench as run_bench

    peer_from = Path(args.peer_from) if args.peer_from else None
    return run_bench(args.workloads, Path(args.out), args.quick, args.peer_rows, peer_from, args.assignments, console)
