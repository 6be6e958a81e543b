"""The hash that verification trusts: every bit and every place counts."""

import math

import pytest
import torch
from torch import Tensor

from draftgraph.capture import bits
from draftgraph.capture.bits import BitHasher, max_difference

CPU = torch.device("cpu")


@pytest.fixture
def hasher(monkeypatch: pytest.MonkeyPatch) -> BitHasher:
    """Chunks of 8 elements, so that small tensors span several."""
    monkeypatch.setattr(bits, "_CHUNK", 8)
    return BitHasher(CPU)


def digest(hasher: BitHasher, tensor: Tensor) -> list[int]:
    return hasher.digest(tensor).tolist()


def values(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, (29,), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool]
)
def test_one_changed_element_changes_both_halves_of_the_hash_wherever_it_is(
    hasher: BitHasher, dtype: torch.dtype
) -> None:
    tensor = values(dtype)
    reference = digest(hasher, tensor)
    for place in range(len(tensor)):
        changed = tensor.clone()
        changed[place] = 1 - changed[place].to(torch.int64)
        assert all(a != b for a, b in zip(digest(hasher, changed), reference, strict=True)), place


def test_every_single_flipped_bit_changes_the_hash(hasher: BitHasher) -> None:
    tensor = torch.randn(11, generator=torch.Generator().manual_seed(0))
    seen = {tuple(digest(hasher, tensor))}
    for place in range(11):
        for bit in range(32):
            flipped = tensor.clone().view(torch.int32)
            flipped[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            seen.add(tuple(digest(hasher, flipped.view(torch.float32))))
    assert len(seen) == 1 + 11 * 32


def test_the_hash_depends_on_the_order_inside_and_across_chunks(hasher: BitHasher) -> None:
    tensor = torch.arange(24.0)
    inside, across, chunks = tensor.clone(), tensor.clone(), tensor.roll(8)
    inside[[0, 1]] = tensor[[1, 0]]
    across[[3, 11]] = tensor[[11, 3]]
    assert len({tuple(digest(hasher, t)) for t in (tensor, inside, across, chunks)}) == 4


def test_changes_in_arithmetic_progression_do_not_cancel(hasher: BitHasher) -> None:
    tensor = torch.zeros(24, dtype=torch.int32)
    changed = tensor.clone()
    changed[4:7] = torch.tensor([1, -2, 1])
    assert digest(hasher, changed) != digest(hasher, tensor)


def test_nans_and_signed_zeros_are_bits_like_any_other(hasher: BitHasher) -> None:
    poisoned = torch.tensor([1.0, math.nan, 2.0])
    assert digest(hasher, poisoned) == digest(hasher, poisoned.clone())
    assert digest(hasher, poisoned) != digest(hasher, torch.tensor([math.nan, 1.0, 2.0]))
    assert digest(hasher, torch.tensor([0.0])) != digest(hasher, torch.tensor([-0.0]))


def test_the_hash_does_not_depend_on_strides_and_covers_scalars_and_empty_tensors(hasher: BitHasher) -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert digest(hasher, tensor.T) == digest(hasher, tensor.T.contiguous())
    assert digest(hasher, torch.tensor(3.0)) == digest(hasher, torch.tensor([3.0]))
    assert digest(hasher, torch.zeros(0)) != digest(hasher, torch.zeros(1))


def test_the_largest_difference_ignores_equal_infinities_and_reports_a_lone_nan() -> None:
    first = torch.tensor([1.0, math.inf, math.nan, -2.0])
    assert max_difference(first, first.clone()) == 0.0
    assert max_difference(first, torch.tensor([1.0, math.inf, math.nan, -1.5])) == 0.5
    assert math.isnan(max_difference(first, torch.tensor([1.0, math.inf, 0.0, -2.0])))
