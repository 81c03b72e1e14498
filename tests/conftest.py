"""Before anything imports triton: without a GPU its kernels run in the interpreter. And hypothesis's profile."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A change is judged by the same examples each time; whoever works on the code tries new ones with every run.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
