"""What a job could change in its process, besides memory, and the next job there could tell."""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

State: TypeAlias = Mapping[str, Any]
"""What is so, by name. Variables of the environment are called $NAME."""

TORCHS_OWN = frozenset({"$TORCHINDUCTOR_CACHE_DIR"})
"""Variables that torch gives their default when some of its modules are loaded: jobs are told nothing by them."""

OF_TORCH = (
    "get_default_dtype",
    "get_default_device",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_num_interop_threads",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_anomaly_enabled",
    "is_autocast_cache_enabled",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "utils.deterministic.fill_uninitialized_memory",
    "backends.fp32_precision",
    "backends.mkldnn.enabled",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.fp32_precision",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
)
"""Settings and functions without arguments that tell one."""

OF_THE_PROCESS: dict[str, Callable[[], Any]] = {
    "the working directory": os.getcwd,
    "umask": lambda: re.findall(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE),
    "sys.path": lambda: tuple(sys.path),
    "gc.isenabled": gc.isenabled,
    "denormal numbers": lambda: sys.float_info.min / 2 > 0,  # torch cannot be asked whether it flushes them to zero
    "autocast on CPUs": lambda: _autocast("cpu"),
    "autocast on GPUs": lambda: _autocast("cuda"),
}

CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
"""Modules of settings, loaded by whoever needs them first: until then all is as it comes. Each tells what was set."""


def state() -> State:
    """As it is now."""
    torch = importlib.import_module("torch")
    return {
        **{f"torch.{name}": _ask(functools.partial(_value, torch, name)) for name in OF_TORCH},
        **{name: _ask(reader) for name, reader in OF_THE_PROCESS.items()},
        **{name: sys.modules[name].codegen_config() if name in sys.modules else "" for name in CONFIGS},
        **{f"${name}": value for name, value in os.environ.items()},
    }


def changed(before: State, after: State) -> list[str]:
    """What is not as it was, by name."""
    names = (before.keys() | after.keys()) - TORCHS_OWN
    return sorted(name for name in names if before.get(name) != after.get(name))


def _value(torch: Any, name: str) -> Any:
    found = operator.attrgetter(name)(torch)
    return found() if callable(found) else found


def _autocast(device: str) -> tuple[Any, ...]:
    torch = importlib.import_module("torch")
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _ask(reader: Callable[[], Any]) -> Any:
    """What cannot be told, in this version of torch or since a job did something odd, has the complaint for a value."""
    try:
        return reader()
    except Exception as error:
        return repr(error)
