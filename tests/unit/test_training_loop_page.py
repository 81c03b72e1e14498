"""The guide for training loops shows the code of the script that `test_documented_commands.py` runs."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.support.command import ROOT

PAGE = (ROOT / "tpbench/docs/training_loop.md").read_text()
SCRIPT = (ROOT / "scripts/training_loop.py").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_page_shows_code_of_the_script(block: str) -> None:
    indented = [textwrap.indent(block, depth * " ") for depth in (0, 4, 8)]
    assert any(f"\n{text}" in SCRIPT for text in indented)


def test_the_page_shows_the_loss_and_the_loop() -> None:
    assert ["EntropyLoss(" in block for block in BLOCKS] == [True, False]
    assert "torchrun --nproc-per-node=2 scripts/training_loop.py" in PAGE
