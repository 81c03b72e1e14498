"""Build a problem's model from the transformers package, name its parts, and give it its initial weights.

Weights are hashed from the seed: every sharding gives the same bits, and each rank computes only its own shard.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers.modeling_utils  # noqa: F401  every model needs it: import it before jobs are forked, not in each
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from tpbench.settings import JobError
from tpbench.workloads.hashing import NORMAL_DEVIATION, fill_normal
from tpbench.workloads.train_step.estimates import matrix_parameters
from tpbench.workloads.train_step.model.configuration import model_configuration, refused_by_transformers
from tpbench.workloads.train_step.problem import TrainStep

DEVIATION = 0.02
"""Standard deviation of matrices, as in Qwen and Llama. Weights of norms are ones at first, and biases are zeros."""


def build(problem: TrainStep, *, fused_norms: bool = True) -> Any:
    """Return the model in training mode, with parameters on the meta device and buffers on the CPU.

    RMS norms are replaced by fused ones, unless `fused_norms` is false. Layer norms of torch are one operation already,
    and Gemma's RMS norms, which multiply by one plus their weights, stay. Each layer is compiled and checkpointed if
    the problem says so; one graph serves all layers. Raises JobError.
    """
    model = _made(problem)
    actual = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    if actual != (counted := matrix_parameters(problem)):
        raise JobError(
            f"{problem.title} has {actual} weights in matrices where a dense decoder of its sizes has {counted}: "
            "operations and memory would be counted wrong"
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            epsilon = getattr(child, "variance_epsilon", getattr(child, "eps", 0.0))
            if fused_norms and kind.endswith("RMSNorm") and not kind.startswith("Gemma") and hasattr(child, "weight"):
                setattr(parent, name, FusedNorm(child.weight, epsilon))
    model.train()
    for layer in decoder_layers(model):
        if problem.compile:  # at its first call. Hooks of FSDP and of tensor parallelism are host code, outside of it
            layer.forward = torch.compile(layer.forward)
        if problem.activation_checkpointing:
            # No layer has random numbers whose state a recomputation would need. Reading it would end a capture.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def _made(problem: TrainStep) -> Any:
    """Return the model as transformers makes it, with the names of its parts and its plan of sharding."""
    configuration = model_configuration(problem)
    kind: Any = AutoModelForCausalLM._model_mapping[type(configuration)]
    if problem.attention == "sdpa" and not getattr(kind, "_supports_sdpa", True):
        raise JobError(f"transformers has no attention=sdpa for {problem.title}; attention=eager can be trained")
    source = "config.json" if problem.model_dir else "sizes"
    complaint = f"transformers cannot make {problem.title} of its {source}"
    with refused_by_transformers(complaint), register_module_parameter_registration_hook(_on_meta):
        model = AutoModelForCausalLM.from_config(configuration, dtype=getattr(torch, problem.stored_dtype))
    model.parts = _decoder_parts(problem, model)
    plan = model.config.base_model_tp_plan or {}
    model.shard_plan = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in plan.items()}
    return model


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
    """Move a parameter to the meta device as a module gets it, and leave buffers, which have values, where they are."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


class DecoderParts(NamedTuple):
    """Names of the embedding, the layers and the norm behind them in the model. The head is always `lm_head`."""

    embedding: str
    layers: str
    norm: str


def _decoder_parts(problem: TrainStep, model: Any) -> DecoderParts:
    """Return the parts of a model. Raises JobError for other parts, and for weights in others."""
    prefix = model.base_model_prefix
    parts = DecoderParts(f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm")
    owners = [name for name, _, _ in (key.rpartition(".") for key in dict(model.named_parameters()))]
    others = [name for name in owners if not f"{name}.".startswith((*(f"{part}." for part in parts), "lm_head."))]
    missing = {*parts, "lm_head"} - dict(model.named_modules()).keys()
    if others or missing:
        beside = f": it has weights in {', '.join(dict.fromkeys(others[:3]))}" if others else ""
        raise JobError(
            f"{problem.architecture} is no decoder of embed_tokens, layers, a norm and a linear lm_head{beside}"
        )
    return parts


def decoder_layers(model: Any) -> Any:
    """Return the list of decoder layers."""
    return model.get_submodule(model.parts.layers)


def modules_in_order(model: Any) -> list[nn.Module]:
    """Return the modules that hold all parameters, in the order of the forward pass: embedding, layers, norm, head."""
    parts = model.parts
    embedding, norm = model.get_submodule(parts.embedding), model.get_submodule(parts.norm)
    return [embedding, *decoder_layers(model), norm, model.lm_head]


class FusedNorm(nn.Module):
    """RMS norm of the last dimension as one operation, for all variants, in place of transformers' several ones."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.epsilon)


def materialise(model: Any, device: torch.device, seed: int) -> None:
    """Move the whole model to `device` and fill it with its initial weights."""
    place_buffers(model, device)
    make_parts(model, device, seed)


def make_parts(
    model: Any, device: torch.device, seed: int, made: Callable[[nn.Module], object] = lambda part: None
) -> None:
    """Make the weights of one part after the other, and call `made` with each part. Buffers are on `device` already."""
    names = {module: f"{name}." for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.lm_head
    tied = head.weight is embedding.weight
    if tied:
        head.weight = None
    for part in modules_in_order(model):
        allocate(part, device)
        fill(part, names[part], seed)
        made(part)
    if tied:
        head.weight = embedding.weight


def place_buffers(model: Any, device: torch.device) -> None:
    """Move the model's buffers, such as frequencies of rotary embeddings, to `device`."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the module's parameters uninitialised memory on `device`, and keep its buffers."""
    buffers = dict(module.named_buffers())
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill(module: nn.Module, prefix: str, seed: int) -> None:
    """Fill vectors of `module` with ones (biases with zeros), and matrices with normal numbers hashed from (seed, name,
    row, column).

    `prefix` is the module's name in the model with a dot at its end, or empty for the whole model.
    """
    for name, parameter in module.named_parameters():
        shard: Tensor = parameter
        first: tuple[int, ...] = (0, 0)
        if isinstance(parameter, DTensor):  # over the tensor-parallel mesh: replicas shard later
            mesh, placements = parameter.device_mesh, parameter.placements
            shard = parameter.to_local()
            _, first = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        if parameter.dim() < 2:
            shard.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            stream = zlib.crc32((prefix + name).encode()) & ~1
            fill_normal(shard, seed, stream, DEVIATION / NORMAL_DEVIATION, (first[0], first[1]))
