"""Import the packages of the train step once for all ranks: on two cores, four imports beside each other take long."""

import torch

from tests.support.ranks import PRELOAD

if not torch.cuda.is_available():  # an import that initialises CUDA would break it in forked ranks
    PRELOAD += ["torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"]
