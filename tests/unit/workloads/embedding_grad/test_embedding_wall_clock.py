"""By wall clock no committed sparse exchange loses to the dense one where its device time wins."""

from __future__ import annotations

from tests.support.command import ROOT
from tpbench.results.read import load, plain_rows
from tpbench.workloads.embedding_grad.traffic.crossover_study import density_times


def test_sparse_exchanges_that_win_by_device_time_win_by_wall_clock() -> None:
    """Rows with search=host do not count: their device times leave the search out."""
    times = density_times(plain_rows(load(ROOT / "outputs/reference", workload="embedding_grad")))
    sparse = [each for each in times if each.variant.startswith("sparse") and "search=host" not in each.variant]
    winners = [each for each in sparse if each.speedup is not None and each.speedup > 1]
    variants = {each.variant for each in winners}
    assert {"sparse_all_to_all", "sparse_symmetric", "sparse_auto", "sparse_symmetric graph=true"} <= variants
    assert [each for each in winners if each.wall_speedup is not None and each.wall_speedup < 1] == []
