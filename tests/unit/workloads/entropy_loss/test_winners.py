"""The file of block caps follows from the committed rows."""

from __future__ import annotations

import json

from tests.support.command import ROOT
from tpbench.kernels.block_caps import FILE
from tpbench.report.command_line import read_rows
from tpbench.results.read import plain_rows
from tpbench.workloads.entropy_loss.winners import choose

KERNELS = ROOT / "tpbench/kernels"


def test_the_block_caps_are_those_of_the_committed_rows() -> None:
    chosen = choose(plain_rows(read_rows([str(KERNELS / "rows")])), "tpbench/kernels/rows")
    assert json.loads((KERNELS / FILE).read_text()) == chosen
