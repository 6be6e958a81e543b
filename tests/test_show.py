"""Tables for people, in narrow terminals."""

import io

import pytest
from rich.console import Console

from draftgraph.engine.show import columns_table, holdings, show_evaluation


def lines(print_to, width):
    console = Console(file=io.StringIO(), width=width)
    print_to(console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_prompts_with_a_long_path_leave_their_figures_whole(width):
    path = "/data/" + "a-folder-with-a-long-name/" * 4 + "questions.jsonl"
    row = {"name": path, "prompts": 164, "acceptance": 3.214, "acceptance_per_slot": [0.85] * 15}
    chain = {**row, "identical_to_greedy": True}
    tree = {"sets": [{**chain, "acceptance": 4.125}]}
    values = {"sets": [chain], "tree": tree, "different_from_one_token": 0}
    shown = lines(lambda console: show_evaluation(console, values), width)
    assert max(map(len, shown)) <= width
    [figures] = [line.split() for line in shown if "3.214" in line]
    assert {"164", "0.85", "yes", "4.125"} <= set(figures)
    assert path in "".join(line.split("  ")[0].strip() for line in shown)


def test_kernels_of_many_lanes_fit_under_their_kinds():
    kinds = {"target": 5, "drafter": 3, "optimizer": 3}
    graphs = [
        {"step": kind, "lane": f"{kind} {lane}", "bucket": "", "families": {"gemm": 1234, "cross_entropy": 2}}
        for kind, count in kinds.items()
        for lane in range(count)
    ]
    shown = lines(lambda console: console.print(columns_table("Kernels", holdings(graphs))), 80)
    assert [line.split() for line in shown if "gemm" in line] == [["gemm", "1234", "1234", "1234"]]
    assert any(line.split() == ["family", *kinds] for line in shown)
