"""`draftgraph demo`: the whole job on a small real model, and what came of it in words a newcomer understands."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from draftgraph.engine.config import load_profile
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.template import Template
from draftgraph.engine.errors import Interrupted
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.target import EMBEDDED, load_config, load_tokenizer
from draftgraph.engine.plan import make_plan
from draftgraph.engine.predict import summary as planning
from draftgraph.engine.predict.show import show_plan
from draftgraph.engine.progress import teller
from draftgraph.engine.saved import EvalOptions, card_facts, evaluate_saved, keep_evaluation, load_saved
from draftgraph.engine.train import train
from draftgraph.profiles.load import DATA

CONVERSATIONS = DATA / "smollm2-code.jsonl"
NUM_PROMPTS, NEW_TOKENS = 16, 64


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the next free name beside it: an earlier demo is never overwritten."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def demo(wanted: Path, console: Console) -> dict[str, Any]:
    """Prepare, plan, train, evaluate before and after, export; returns the summary."""
    on_gpu = torch.cuda.is_available()
    name = "smollm2-gpu" if on_gpu else "smollm2-cpu"
    folder = free_folder(wanted)
    shards = folder / "shards"
    started = time.perf_counter()

    def chapter(number: int, title: str) -> None:
        minutes, seconds = divmod(int(time.perf_counter() - started), 60)
        console.rule(f"[bold]{number}/5 {title}[/] ({minutes}:{seconds:02d})", align="left")

    profile = load_profile(name, [f'data.shards="{shards}"'])
    chapter(1, f"prepare {CONVERSATIONS.name} for SmolLM2-135M-Instruct, in {folder}")
    prepare(
        [CONVERSATIONS],
        Template(load_tokenizer(EMBEDDED)),
        shards,
        max_context=profile.buckets.max_context,
        block_size=profile.drafter.block_size,
        vocab_size=load_config(EMBEDDED).vocab_size,
        anchor_rule=profile.drafter.anchor_rule,
        target=EMBEDDED,
        progress=True,
    )
    chapter(2, f"plan profile {name}")
    show_plan(console, planning.summary(make_plan(profile)))
    chapter(
        3, "train: warm up and " + ("capture CUDA graphs" if on_gpu else "run eagerly (no GPU)") + ", then the steps"
    )
    try:
        trained = train(profile, folder, False, console)
    except Interrupted as stop:
        raise Interrupted(
            f"{stop}: draftgraph train {folder / 'profile.toml'} --run {folder} --resume; then draftgraph eval "
            f"{folder} --untrained. Another demo starts anew, in a folder of its own"
        ) from stop
    chapter(4, f"evaluate: {NUM_PROMPTS} HumanEval prompts, before and after training")
    saved = load_saved(folder)
    options = EvalOptions(num_prompts=NUM_PROMPTS, new_tokens=NEW_TOKENS, untrained=True)
    measured = evaluate_saved(saved, "", options, console)
    chapter(5, "export: for z-lab's code, SGLang and vLLM")
    keep_evaluation(folder, saved, measured, teller(console))
    export_drafter(folder / "drafter", saved.drafter, load_config(EMBEDDED), card=card_facts(folder, saved, EMBEDDED))
    summary = {
        "profile": name,
        "run": str(folder),
        "seconds": round(time.perf_counter() - started, 1),
        "steps": trained["steps"],
        "real_tokens_per_s": trained["real_tokens_per_s"],
        "acceptance_untrained": measured["untrained"]["acceptance"],
        "acceptance_trained": measured["acceptance"],
        "acceptance_gain": measured["acceptance"] - measured["untrained"]["acceptance"],
        "acceptance_per_slot": measured["acceptance_per_slot"],
        "simulated_acceptance_before": trained["acceptance_before"],
        "simulated_acceptance_after": trained["acceptance_after"],
        "identical_to_greedy": measured["identical_to_greedy"] and measured["untrained"]["identical_to_greedy"],
        "loss_first": trained["loss_first"],
        "loss_last": trained["loss_last"],
        "graphs": trained["graphs"],
        "alloc_bytes_per_step": trained["alloc_bytes_per_step"],
        "device_used_range_bytes": trained["device_used_range_bytes"],
        "export": str(folder / "drafter"),
        "receipt": trained["receipt"],
    }
    (folder / "demo.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(story(summary))
    return summary


def story(s: dict[str, Any]) -> Panel:
    """What a newcomer should take away."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", "[bold]before[/]", "[bold]after[/]")
    rows = [
        ("tokens per target forward, on HumanEval", "acceptance_untrained", "acceptance_trained"),
        ("the same, simulated on training rows", "simulated_acceptance_before", "simulated_acceptance_after"),
        ("training loss", "loss_first", "loss_last"),
    ]
    for name, before, after in rows:
        table.add_row(name, f"{s[before]:.3f}", f"[bold green]{s[after]:.3f}[/]")
    same = "identical to" if s["identical_to_greedy"] else "[bold red]NOT identical to[/]"
    mode = f"{s['graphs']} captured CUDA graphs" if s["graphs"] else "eagerly on the CPU, no graphs"
    text = (
        "A small drafter learned to guess the next words of SmolLM2-135M-Instruct.\n"
        "The model checks each guess in one forward, so its answers stay the same\n"
        "and come in fewer forwards. (1.000: no guess was right; the token that\n"
        "each check yields anyway is counted.)\n"
    )
    rest = (
        f"\nAnswers {same} plain greedy decoding.\n"
        f"{s['steps']} steps, {mode}, {s['seconds'] / 60:.1f} minutes in all.\n"
        f"Run folder: {escape(s['run'])}\n"
        f"Curves, memory, evidence: {escape(s['run'])}/report.html\n"
        f"Drafter for SGLang and vLLM: {escape(s['export'])}\n"
        f"Next: draftgraph eval {escape(s['run'])} --num-prompts 32\n"
        "Your own data: draftgraph prepare --help"
    )
    return Panel(Group(text, table, rest), title="[bold]draftgraph demo[/]", title_align="left", expand=False)
