"""The tiling of the one-pass kernels, and the choice of block caps."""

import itertools

import pytest

from tests.support.fake_gpu import H200
from tpbench.kernels import COMPARING_LOSSES
from tpbench.kernels.block_caps import measured_cap, measured_caps
from tpbench.kernels.one_pass.tiling import MAX_WORDS, RESERVED_BYTES, Machine, Tiling, tiling
from tpbench.workloads.entropy_loss.cost_model import LossSize, parts_of_row


@pytest.mark.parametrize(("loss", "longest"), [("cross_entropy", 131072), ("reverse_kl", 65536)])
def test_a_row_that_fits_a_multiprocessor_is_one_programs(loss: str, longest: int) -> None:
    for share in range(4096, longest + 1, 4096):
        plan = tiling(4096, share, share, 1, 2, loss, "auto", True, H200)
        assert isinstance(plan, Tiling) and plan.parts == 1 and plan.SLOTS == 0
    longer = tiling(4096, longest + 8, longest + 8, 1, 2, loss, "auto", True, H200)
    assert isinstance(longer, Tiling) and longer.parts > 1 and longer.KERNEL != "whole_row"


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl", "jsd", "total_variation"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("on", [H200, Machine(108, 166912), Machine(84, 101376)], ids=["H200", "A100", "A10"])
@pytest.mark.parametrize("cap", ["auto", 16, 256, 1024, 8192, 65536])
def test_every_tiling_fits_the_machine(loss: str, itemsize: int, on: Machine, cap: int | str, options: bool) -> None:
    shares = (1, 8, 1000, 8192, 32768, 50264, 65536, 100000, 131072, 262144)
    for share, world in itertools.product(shares, (1, 2, 3, 16)):
        plan = tiling(4096, share, share, world, itemsize, loss, cap, True, on, options=options)
        if isinstance(plan, str):
            assert plan == f"its rows are too long with block_cap={cap}"
            continue
        columns = {
            "whole_row": (plan.TILES - 1) * plan.columns,
            "one_pass": plan.room + (plan.TILES - 1) * plan.columns,
            "shared_rows": 2 * plan.room,
            "mixture": 3 * plan.room,
        }[plan.KERNEL]
        numbers = 1 if loss == "cross_entropy" else 2
        bytes_of = columns * plan.ROWS * itemsize * numbers + RESERVED_BYTES
        assert bytes_of * plan.programs_per_sm <= on.shared_bytes + RESERVED_BYTES
        assert plan.KERNEL != "whole_row" or plan.TILES >= 5
        assert plan.parts * plan.part_columns >= share > (plan.parts - 1) * plan.part_columns
        assert plan.columns >= plan.block and plan.room >= plan.part_columns
        assert cap == "auto" or plan.block <= max(int(cap), plan.LANES * plan.VECTOR)  # a vector for each thread
        ranks = 1 << (world - 1).bit_length()
        assert plan.ROWS * ranks * plan.SLOTS <= MAX_WORDS and plan.SLOTS & (plan.SLOTS - 1) == 0
        assert max(plan.parts, plan.SLOTS) <= on.processors * plan.programs_per_sm
        assert (plan.SLOTS == 0) == (world == 1 and plan.parts == 1 and loss not in COMPARING_LOSSES)
        assert plan.parts * (plan.SLOTS > 0) <= plan.SLOTS
        assert not (plan.KERNEL == "whole_row" and plan.SLOTS)
        assert plan.AHEAD < plan.TILES
        assert plan.registers * 32 * plan.WARPS * plan.programs_per_sm <= 65536
        assert plan.LANES * plan.ROW_WARPS == 32 * plan.WARPS


@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
@pytest.mark.parametrize("vocab", [32000, 50304, 100352, 128256, 151936, 201088, 248320, 256000])
def test_shards_of_real_vocabularies_fill_their_tiles(vocab: int, loss: str) -> None:
    for world in (1, 2, 4, 8):
        share = vocab // world
        plan = tiling(4096, share, share, world, 2, loss, "auto", True, H200)
        assert isinstance(plan, Tiling)
        filled = share / (plan.parts * plan.room)
        assert filled > (0.75 if share >= 25000 else 0.6), (world, plan)


def test_a_shard_of_twice_the_average_is_the_widest() -> None:
    """Ranks that know the widest shard refuse it together: the rank that holds it, and the one that holds little."""

    def plan(held: int, cap: int | str = "auto", widest: int | None = None) -> Tiling | str:
        return tiling(4096, held, 32768, 2, 2, "cross_entropy", cap, True, H200, widest)

    even, wide = plan(32768), plan(2 * 32768)
    assert isinstance(even, Tiling) and isinstance(wide, Tiling)
    assert even.SLOTS == wide.SLOTS == 2 * even.parts >= wide.parts > even.parts
    assert plan(32768, widest=2 * 32768) == even
    with pytest.raises(ValueError, match="too uneven for exchange='symmetric', use exchange='nccl'"):
        plan(4 * 32768)
    for held in (4 * 32768, 32768 // 2):
        uneven = "its logits have 131072 columns on a rank of 32768 on the average: too uneven"
        assert plan(held, widest=4 * 32768) == uneven
        assert plan(held, 16, 4 * 32768) == "its rows are too long with block_cap=16"


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl", "jsd"])
def test_the_cost_model_knows_how_many_parts_are_sent(loss: str, entropy: bool) -> None:
    for vocab, ranks in itertools.product((8192, 32000, 128256, 131072, 151936, 262144), (2, 4, 8)):
        plan = tiling(4096, vocab // ranks, vocab // ranks, ranks, 2, loss, "auto", True, H200, options=entropy)
        assert isinstance(plan, Tiling) and parts_of_row(LossSize(4096, vocab, ranks, loss), entropy) == plan.SLOTS


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"])
@pytest.mark.parametrize("algorithm", ["two_reads", "two_kernels", "one_read"])
def test_auto_is_the_narrowest_measured_width_that_fits(algorithm: str, loss: str) -> None:
    caps = {int(columns): cap for columns, cap in measured_caps()[algorithm][loss].items()}
    for columns, cap in caps.items():
        assert measured_cap(algorithm, loss, columns) == measured_cap(algorithm, loss, columns - 1) == cap
    assert measured_cap(algorithm, loss, 1) == caps[min(caps)]
    assert measured_cap(algorithm, loss, 10**7) == caps[max(caps)]
