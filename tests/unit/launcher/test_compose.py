"""The composition of a sweep's cells."""

from __future__ import annotations

import pytest

from tests.support.composed_jobs import composed
from tpbench.settings import JobError


def test_values_may_refer_to_others_and_to_hydras_own_configuration() -> None:
    assert composed("output_dir=o-${dp_size}", "dp_size=3")["output_dir"] == "o-3"
    line = "output_dir=o-${hydra:job.num}-${hydra:runtime.choices.loss}"
    assert composed(line, "loss=forward_kl")["output_dir"] == "o-0-forward_kl"
    with pytest.raises(JobError, match="refers to another one that cannot be found"):
        composed("seed=${nothing}")
