"""Import the packages of the train step once for all ranks: on two cores, four imports beside each other take long."""

import pytest
import torch

from tests.support.ranks import PRELOAD
from tpbench.packages import installed

if not torch.cuda.is_available():  # an import that initialises CUDA would break it in forked ranks
    PRELOAD += ["torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip cases of autotp without DeepSpeed."""
    if not installed("deepspeed"):
        for item in items:
            if "[" in item.nodeid and "autotp" in item.nodeid:
                item.add_marker(pytest.mark.skip("needs deepspeed"))
