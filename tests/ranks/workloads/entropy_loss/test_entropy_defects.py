"""Planted defects of one rank's gradient are found at real numbers of columns, and right variants are never wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.defects import DEFECTS, IS_CAMPAIGN, LARGE_SEEDS, SEEDS, output_of_step, remember
from tests.support.entropy_loss import DTYPES, LOSSES, context, problem, right_gradient
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle
from tpbench.workloads.losses import LARGEST_SCALE


class WithoutLastColumn(Oracle):
    """An oracle with a softmax whose sum lacks the last column of the last rank."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        log_p = super().log_softmax(x)
        is_last = self.shard.tp_rank == self.shard.tp_size - 1
        lost = self.sum(log_p[:, -1].exp() * is_last)
        return log_p - torch.log1p(-lost)[:, None]


def verdicts(here: Rank, cell: EntropyLoss, variant: str, has_defects: bool) -> dict[str, list[str | None]]:
    """Return why a variant and each of its defects are wrong, with the first inputs and with changed ones."""
    session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants[variant], context(here))
    found: dict[str, list[str | None]] = {}
    is_last = here.rank == here.world_size - 1
    stale = None
    for is_changed in (False, True):
        output = output_of_step(session, cell.seed if is_changed else None)
        oracle = Oracle(cell, session.inputs)
        remember(oracle, "log_probabilities")
        grads = {"right": output.grad}
        if has_defects:
            grads |= {name: defect(output.grad) if is_last else output.grad for name, defect in DEFECTS.items()}
            # Only this gradient, with the right loss: of rows as well as of the mean it would show.
            without = right_gradient(WithoutLastColumn(cell, session.inputs))
            grads["a column left out of the sum"] = without.to(output.grad.dtype)
        if has_defects and stale is not None:
            grads["stale by one call"] = stale if is_last else output.grad
        for name, grad in grads.items():
            if name != "right" and any(found.get(name, ())):
                continue  # found with the first inputs
            found.setdefault(name, []).append(oracle.compare(replace(output, grad=grad)).wrong)
        stale = output.grad
    return found


@pytest.mark.parametrize("vocab", [1000, 32768, 131072, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl", "total_variation"])
def test_each_defect_is_found_and_nothing_else(loss: str, dtype: str, vocab: int) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    if vocab in (32768, 151936) and not IS_CAMPAIGN:
        pytest.skip("131072 columns suffice for each change")
    cell = problem(tokens=4, vocab=vocab, dtype=dtype, loss=loss)
    for seed in SEEDS if vocab == 1000 else LARGE_SEEDS:
        found = run_on_ranks(2, verdicts, replace(cell, seed=seed), "triton_tp", True)[0]
        assert found.pop("right") == [None, None], seed
        unseen = [name for name, wrong in found.items() if not any(wrong)]
        assert not unseen, (seed, unseen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("compute_dtype", ["float32", "logits"])
def test_a_right_variant_is_right_with_every_seed(loss: str, dtype: str, compute_dtype: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    cell = problem(tokens=4, vocab=1000, dtype=dtype, loss=loss, compute_dtype=compute_dtype)
    if WORKLOAD.variants["pytorch_gather"].unsupported_reason(cell, 2):
        pytest.skip("not supported")
    steep = {} if loss == "cross_entropy" else {"temperature": 1 / LARGEST_SCALE[cell.rounded_to]}
    for seed in SEEDS:
        steeper = replace(cell, seed=seed, **(steep if seed % 2 else {}))
        assert run_on_ranks(2, verdicts, steeper, "pytorch_gather", False)[0]["right"] == [None, None], seed
