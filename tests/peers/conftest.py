"""Settings of the tests with other training codes, whose environments lack what `tests/conftest.py` imports."""

import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("tests.support.quick_interpreter")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
