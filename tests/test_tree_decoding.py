"""Trees of drafts: the likeliest paths by their definition, and the target's own answers whatever they hold."""

import heapq
import itertools
from copy import deepcopy

import pytest
import torch
from decoding_cases import NO_STOP, tiny_target
from plain_decoding import draft_logits, greedy, speculative, taps_of
from test_run_decoding import LENGTHS, NEW, fresh, prompts

from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.tree import Tree, ancestors, likeliest_tree, walk
from draftgraph.engine.run.decoding import slots_for
from draftgraph.engine.run.tree_decoding import TreeLane


def best_first(logits, budget):
    """Best-first search with a heap: the `budget` likeliest paths, as tuples of tokens."""
    slots = [sorted(enumerate(row.tolist()), key=lambda pair: -pair[1]) for row in logits.log_softmax(-1)]
    heap, found = [(-slots[0][0][1], (0,))], []
    while heap and len(found) < budget:
        cost, ranks = heapq.heappop(heap)
        found.append(tuple(slots[k][rank][0] for k, rank in enumerate(ranks)))
        k, last = len(ranks) - 1, ranks[-1]
        if last + 1 < len(slots[k]):
            heapq.heappush(heap, (cost + slots[k][last][1] - slots[k][last + 1][1], (*ranks[:-1], last + 1)))
        if k + 1 < len(slots):
            heapq.heappush(heap, (cost - slots[k + 1][0][1], (*ranks, 0)))
    return found


def paths_of(tree, row):
    """Every node's path below the root, by following parents."""
    paths = []
    for node in range(1, tree.tokens.shape[1]):
        path = []
        while node:
            path.append(int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        paths.append(tuple(reversed(path)))
    return paths


@pytest.mark.parametrize("budget", [1, 4, 16, 50])
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_a_tree_holds_the_likeliest_paths(budget, block_size):
    vocab = 64
    logits = 3 * torch.randn(3, block_size - 1, vocab, generator=torch.Generator().manual_seed(budget))
    tree = likeliest_tree(torch.tensor([7, 8, 9]), logits, budget)
    assert tree.tokens[:, 0].tolist() == [7, 8, 9]
    for row in range(3):
        assert sorted(paths_of(tree, row)) == sorted(best_first(logits[row], budget))
        assert all(tree.parents[row, node] < node for node in range(1, 1 + budget))
        assert tree.depths[row].tolist() == [0, *map(len, paths_of(tree, row))]
    seen = ancestors(tree, block_size)
    for row, node in itertools.product(range(3), range(1 + budget)):
        path, at = {node}, node
        while at:
            at = int(tree.parents[row, at])
            path.add(at)
        assert set(seen[row, node].nonzero().flatten().tolist()) == path


def test_a_certain_drafter_s_tree_is_its_chain():
    logits = torch.zeros(1, 4, 9)
    logits[0, range(4), [3, 1, 4, 1]] = 1e4  # a probability of exactly one
    assert paths_of(likeliest_tree(torch.tensor([0]), logits, 4), 0) == [(3,), (3, 1), (3, 1, 4), (3, 1, 4, 1)]


def test_a_walk_takes_the_longest_path_that_the_target_says():
    tree = Tree(
        torch.tensor([[9, 1, 2, 3, 4, 3]]), torch.tensor([[0, 0, 0, 1, 3, 2]]), torch.tensor([[0, 1, 1, 2, 3, 2]])
    )
    path, accepted = walk(tree, torch.tensor([[1, 3, 0, 5, 6, 0]]), 5)
    assert accepted.tolist() == [2] and path[0, :3].tolist() == [0, 1, 3]
    path, accepted = walk(tree, torch.tensor([[9, 0, 0, 0, 0, 0]]), 5)  # the newest token is no draft
    assert accepted.tolist() == [0] and path[0, 0] == 0


def lane_of(model, drafter, budget):
    slots = slots_for(max(LENGTHS), NEW, drafter.shape.block_size, budget)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    target = CachedTarget(model, drafter.shape.target_layer_ids, len(LENGTHS), slots)
    lane = TreeLane(
        budget, "eval", target, CachedDrafter(deepcopy(drafter), *weights, len(LENGTHS), slots), NO_STOP, "eager"
    )
    lane.lane.warm_up(1)
    references = eager_references([lane.lane], rounds=1)
    lane.lane.capture()
    compare([lane.lane], references)
    lane.drafter.drafter.load_state_dict(drafter.state_dict())  # verification left noise
    return lane


def by_definition(model, drafter, prompt, budget):
    """Counts of trees that are searched with a heap and walked along the target's own answer."""
    row = torch.cat([prompt, torch.tensor(greedy(model, prompt, NEW))])
    taps = taps_of(model, row, drafter.shape.target_layer_ids)

    def drafts(start):
        paths = set(best_first(draft_logits(model, drafter, taps, row, start), budget))
        answer = tuple(row[start + 1 :].tolist())
        longest = max((k for k in range(1, drafter.shape.block_size) if answer[:k] in paths), default=0)
        return answer[:longest]

    return speculative(model, drafter, prompt, NEW, drafts=drafts)


@pytest.mark.parametrize(
    ("family", "block_size", "budget"), [("llama", 4, 16), ("qwen3", 2, 16), ("gemma3_text", 5, 40), ("llama", 16, 256)]
)
def test_trees_give_the_target_s_answers_and_accept_what_the_definition_does(family, block_size, budget):
    model, drafter = tiny_target(family), fresh(block_size)
    lane = lane_of(model, drafter, budget)
    lane.answer(lane.start(prompts(), NEW))
    chain = lane.rows.counts.sum(0).tolist()
    lane.answer(lane.start(prompts(), NEW), "verify tree")
    for r, prompt in enumerate(prompts()):
        tokens, counts = by_definition(model, drafter, prompt, budget)
        assert lane.rows.answer(r) == tokens
        assert lane.rows.counts[r].tolist() == counts
    tree = lane.rows.counts.sum(0).tolist()
    assert sum(tree[1:]) / tree[0] > 1.3 * sum(chain[1:]) / chain[0]


def test_a_hybrid_target_is_refused_with_the_reason():
    model = tiny_target("qwen3_5_text")
    with pytest.raises(UsageError, match=r"qwen3_5_text.*3 gated delta layers.*no branches"):
        lane_of(model, fresh(4), 16)
