"""Models that transformers does not have: a class in a user's file, which the command line names, builds them."""

import contextlib
import functools
import hashlib
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import PretrainedConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads.train_step.model.configuration import sizes
from tpbench.workloads.train_step.problem import TrainStep

BUILT = "built"
"""The architecture of models that a builder makes."""
STYLES = {ColwiseParallel: "colwise", RowwiseParallel: "rowwise"}
"""The names of styles in plans of transformers."""


@dataclass
class ModelConfig:
    """Sizes of a dense decoder, from which tpbench counts operations and memory."""

    name: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int


class BaseModelBuilder(ABC):
    """Builds a decoder of an embedding, layers, a norm and a linear `lm_head`.

    The model takes `input_ids` and, if its forward method names them, `position_ids` and `attention_mask`. It returns
    the logits, or an object that has them.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._config: ModelConfig | None = None  # for `get_config`, which may keep its result here

    @abstractmethod
    def get_config(self) -> ModelConfig:
        """Return the sizes of the model as published."""

    @abstractmethod
    def create_model(
        self, device: torch.device, dtype: torch.dtype, num_layers: int = 0, attn_impl: str = "sdpa"
    ) -> nn.Module:
        """Return the model with `num_layers` layers (0: all) on the device. tpbench sets the weights itself."""

    @abstractmethod
    def get_tp_mapping(self) -> dict[str, Any]:
        """Return `ColwiseParallel()` or `RowwiseParallel()` for each linear layer, by its name within a decoder layer.
        Parts without an entry are replicated."""

    @abstractmethod
    def get_transformer_layers(self, model: Any) -> nn.ModuleList:
        """Return the list of decoder layers."""

    @abstractmethod
    def get_embedding_module(self, model: Any) -> Any:
        """Return the embedding."""

    @abstractmethod
    def replace_embedding_module(self, model: Any, new_embedding: nn.Module) -> None:
        """Put a sharded embedding in place of the embedding."""


_registered: dict[str, type[BaseModelBuilder]] = {}


def register_model(name: str) -> Callable[[type[BaseModelBuilder]], type[BaseModelBuilder]]:
    """Return the decorator that registers a builder for `model=FILE.py:NAME`."""

    def register(builder: type[BaseModelBuilder]) -> type[BaseModelBuilder]:
        _registered[name] = builder
        return builder

    return register


@functools.cache
def builder_of(model_file: str) -> tuple[BaseModelBuilder, str]:
    """Run the file of `FILE.py:NAME`. Return the builder and a hash of the file."""
    file, _, name = model_file.rpartition(":")
    content = Path(file).read_bytes()
    module = ModuleType(f"tpbench_model_{Path(file).stem}")
    sys.modules[module.__name__] = module  # as dataclasses expect
    _registered.clear()
    exec(compile(content, file, "exec"), vars(module))
    if name in _registered:
        return _registered[name](name), hashlib.sha256(content).hexdigest()[:12]
    if not _registered:
        raise JobError(f'model={model_file}: the file registers no model: write @register_model("{name}") over a class')
    raise JobError(unknown("model", name, _registered))


@contextlib.contextmanager
def blamed(model_dir: str | None) -> Iterator[None]:
    """Turn any error of a user's file into a JobError in one line, with the line of that file if it has one.

    `model_dir`: FILE.py:NAME. Errors with any other model stay as they are.
    """
    try:
        yield
    except Exception as error:
        file = str(model_dir).rpartition(":")[0]
        if isinstance(error, JobError) or not file.endswith(".py"):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"{Path(file).name}:{lines[-1]}: " if lines else ""
        message = f"{place}{type(error).__name__}: {' '.join(str(error).split())}"
        raise JobError(f"model={model_dir} cannot be used: {message}") from error


def problem_fields(model_file: str) -> dict[str, Any]:
    """Return the fields of the problem that the builder sets."""
    builder, file_hash = builder_of(model_file)
    config = builder.get_config()
    model: Any = builder.create_model(torch.device("meta"), torch.bfloat16, 1)
    tied = model.lm_head.weight is builder.get_embedding_module(model).weight
    return {"model": config.name, "architecture": BUILT, "config_hash": file_hash, "tied": tied, **sizes(config)}


def create(problem: TrainStep) -> Any:
    """Return the model, with the methods of a model of transformers that tpbench uses."""
    builder, file_hash = builder_of(str(problem.model_dir))
    if file_hash != problem.config_hash:
        raise JobError(f"model={problem.model_dir}: the file was changed after this job was made from it")
    dtype = getattr(torch, problem.stored_dtype)
    model: Any = builder.create_model(torch.device("cpu"), dtype, problem.depth, problem.attention)
    layers = builder.get_transformer_layers(model)
    plan = builder.get_tp_mapping()
    model.shard_plan = {f"*.{name}": STYLES.get(type(style), str(style)) for name, style in plan.items()}
    heads = {"num_attention_heads": problem.heads, "num_key_value_heads": problem.kv_heads}
    model.config = PretrainedConfig()
    model.config.update(heads | {"tie_word_embeddings": problem.tied})
    model.loss_function = ForCausalLMLoss
    model.get_input_embeddings = lambda: builder.get_embedding_module(model)
    model.set_input_embeddings = lambda embedding: builder.replace_embedding_module(model, embedding)
    model.get_layers = lambda: layers
    compute, accepted = model.forward, inspect.signature(model.forward).parameters

    def forward(input_ids: torch.Tensor, **inputs: Any) -> Any:
        result = compute(input_ids, **{name: value for name, value in inputs.items() if name in accepted})
        return result if hasattr(result, "logits") else CausalLMOutput(logits=result)

    model.forward = forward
    return model
