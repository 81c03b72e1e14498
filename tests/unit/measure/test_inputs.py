"""The inputs of a session: they are changed, changed back, and compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure import inputs
from tpbench.measure.inputs import GeneratedInputs, Inputs, fingerprint, tensors_of


def floats() -> Tensor:
    return torch.linspace(0.5, 9.0, 200, dtype=torch.float64).reshape(100, 2)


def drawn_signs(seed: int, changes: int) -> list[list[int]]:
    """Return the signs of two equally long tensors for so many changes in a row."""
    drawing = Inputs([floats(), floats()])
    drawing.seed = seed
    return [signs.tolist() for _ in range(changes) for signs in drawing.draw().values()]


def test_a_change_negates_whole_rows_of_floating_point_tensors_only() -> None:
    rows, labels, scale = floats(), torch.arange(5), torch.tensor(2.0)
    changing = Inputs([labels, rows, scale])
    drawn = changing.draw()
    assert list(drawn) == [1] and drawn[1].shape == (100,)
    assert sorted(set(drawn[1].tolist())) == [-1, 1] and 25 < int((drawn[1] > 0).sum()) < 75
    changing.change(drawn)
    assert torch.equal(rows, floats() * drawn[1][:, None])
    assert torch.equal(labels, torch.arange(5)) and scale == 2.0


def test_each_change_tensor_and_seed_has_signs_of_its_own() -> None:
    assert drawn_signs(3, changes=4) == drawn_signs(3, changes=4)  # other ranks draw the same
    every = drawn_signs(3, changes=4) + drawn_signs(50, changes=4)
    assert len({tuple(signs) for signs in every}) == 2 * 4 * 2


def test_changes_are_undone_together_and_no_version_counter_shows_them() -> None:
    rows, line = floats(), torch.arange(1.0, 40.0).to(torch.bfloat16)
    changing = Inputs([rows, line])
    before = [each.clone() for each in changing.tensors]
    versions = [each._version for each in changing.tensors]
    changing.remember()
    for _ in range(3):
        last = rows.clone()
        changing.change()
        assert not torch.equal(rows, last) and not changing.unchanged()
    for _ in range(2):  # the second time there is nothing to undo
        changing.undo()
        assert all(map(torch.equal, changing.tensors, before)) and changing.unchanged()
    assert [each._version for each in changing.tensors] == versions


class Powers(GeneratedInputs):
    """Powers of the seed, and its negative."""

    def generate(self, seed: int) -> list[Tensor]:
        return [float(seed) ** torch.arange(4.0), torch.tensor([-float(seed)])]


def test_generated_inputs_change_to_those_of_another_seed_and_back() -> None:
    changing = Powers([3.0 ** torch.arange(4.0), torch.tensor([-3.0])], seed=3)
    first = [each.clone() for each in changing.tensors]
    changing.change()
    assert changing.now == 3 ^ 1 and all(map(torch.equal, changing.tensors, changing.generate(2)))
    changing.change(changing.draw())
    assert changing.now == 3 ^ 2 and all(map(torch.equal, changing.tensors, changing.generate(1)))
    changing.undo()
    assert changing.now == 3 and all(map(torch.equal, changing.tensors, first)) and changing.unchanged()


@pytest.mark.parametrize("changes", [0, 1])
def test_a_write_to_generated_inputs_is_found_when_changes_are_undone(changes: int) -> None:
    changing = Powers([3.0 ** torch.arange(4.0), torch.tensor([-3.0])], seed=3)
    for _ in range(changes):
        changing.change()
    changing.tensors[0][2] += 1
    changing.undo()
    assert not changing.unchanged() and changing.tensors[0][2] == 9


def test_every_bit_is_remembered() -> None:
    rows = floats()
    remembering = Inputs([rows])
    assert not remembering.unchanged()  # nothing is remembered yet
    remembering.remember()
    rows[3, 1] += 1
    assert not remembering.unchanged()
    rows[3, 1] -= 1
    assert remembering.unchanged()


def test_ranks_of_a_group_have_the_seed_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = set()
    for _ in range(3):
        alone = Inputs([])
        alone.remember()
        seeds.add(alone.seed)
    assert len(seeds) == 3 and all(0 <= seed < 2**40 for seed in seeds)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def from_rank_0(seed: Tensor, src: int) -> None:
        seed.fill_(77 + src)

    monkeypatch.setattr(dist, "broadcast", from_rank_0)
    grouped = Inputs([])
    grouped.remember()
    assert grouped.seed == 77


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_fingerprint_depends_on_each_bit_and_on_its_place(dtype: torch.dtype) -> None:
    plain = torch.arange(1, 7).to(dtype)
    bits = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    found = {fingerprint(plain), fingerprint(plain.flip(0)), fingerprint(plain[:-1])}
    width = 8 * plain.element_size()
    for place in range(6):
        for bit in range(width):
            flipped = bits.clone()
            flipped[place] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(bits.dtype)
            found.add(fingerprint(flipped.view(dtype)))
    assert len(found) == 3 + 6 * width
    assert fingerprint(plain.reshape(2, 3)) == fingerprint(plain.clone().requires_grad_(dtype != torch.uint8))


def test_a_fingerprint_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(20.0)
    whole = fingerprint(values)
    for chunk in (1, 7, 20):
        monkeypatch.setitem(inputs._CHUNK, "cpu", chunk)
        assert fingerprint(values) == whole


def test_a_fingerprint_is_the_sum_of_mixed_words() -> None:
    """Python's integers, cut to 64 bits, compute the same."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    values = [0, 1, -5, 2**62, -(2**63)]
    total = 0
    for place, value in enumerate(values):
        word = signed((value + place * inputs._MIX[0]) * inputs._MIX[1])
        word = signed((word ^ (word >> 31)) * inputs._MIX[2])
        total += word ^ (word >> 29)
    assert fingerprint(torch.tensor(values)) == signed(total)


def test_the_tensors_of_a_shard_are_in_its_fields_and_in_tuples() -> None:
    @dataclass
    class Shard:
        one: Tensor
        rows: int
        more: tuple[Tensor, tuple[Tensor, str]]
        none: None = None

    tensors = [torch.zeros(1), torch.ones(2), torch.ones(3)]
    found = tensors_of(Shard(tensors[0], 3, (tensors[1], (tensors[2], "x"))))
    assert [id(each) for each in found] == [id(each) for each in tensors]
