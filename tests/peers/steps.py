"""Time a training code's step with its own loss and with tpbench's. The losses take turns, A B B A, in one process.

    tests/peers/run trl --collect-only -q                # makes the code's environment; or transformers, megatron
    .venv-peers/trl/bin/python -m tests.peers.steps trl
    .venv-peers/megatron/bin/torchrun --nproc-per-node=2 -m tests.peers.steps megatron  # sharded over two ranks

The script prints a table. On a GPU the model has the sizes of Qwen3-0.6B and random weights. A step is forward,
backward and torch's fused AdamW, with 4 x 2048 tokens in bf16. On a CPU the model is tiny, and the times aren't
measurements. The run of transformers has Liger's loss, too, if liger-kernel is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers import conftest as conftest  # chooses Triton's interpreter without a GPU
from tests.peers.compared import tiny_tokenizer
from tpbench.packages import installed

GPU = torch.cuda.is_available()
RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE, DTYPE = (f"cuda:{RANK}", torch.bfloat16) if GPU else ("cpu", torch.float32)
TURNS, STEPS = 4, 5
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = (28, 1024, 3072, 16, 8, 128) if GPU else (2, 32, 64, 4, 2, 8)
VOCAB, BATCH, LENGTH = (151936, 4, 2048) if GPU else (96, 2, 16)
TOKENS = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

Losses = dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]]
"""By name: what replaces the code's loss while it has its turn, and the loss of a step."""


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(DEVICE, DTYPE)


def transformers() -> tuple[nn.Module, Losses]:
    from tpbench.integrations.transformers import patched

    model, tokens = qwen3(), TOKENS.to(DEVICE)

    def loss() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    @contextlib.contextmanager
    def liger() -> Iterator[None]:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        others = {"rope": False, "rms_norm": False, "swiglu": False, "cross_entropy": False}
        apply_liger_kernel_to_qwen3(**others, fused_linear_cross_entropy=True, model=model)
        yield
        del model.forward  # Liger set it on the model alone

    losses: Losses = {
        "Transformers": (contextlib.nullcontext, loss),
        "`patched()`": (patched, loss),
        "`patched(in_place=True)`": (lambda: patched(in_place=True), loss),
    }
    return model, losses | ({"Liger, fused linear": (liger, loss)} if GPU and installed("liger_kernel") else {})


def trl() -> tuple[nn.Module, Losses]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tpbench.integrations.trl import patch

    arguments = SFTConfig(
        tempfile.mkdtemp(), use_cpu=not GPU, report_to=[], per_device_train_batch_size=BATCH, max_length=LENGTH,
        loss_type="nll", bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    trainer = SFTTrainer(qwen3(), args=arguments, train_dataset=rows, processing_class=tiny_tokenizer())
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def loss() -> Tensor:
        return trainer.compute_loss(trainer.model, dict(inputs))

    return trainer.model, {
        "TRL's SFT": (contextlib.nullcontext, loss),
        "`patch(trainer)`": (lambda: patch(trainer), loss),
    }


class Attention(nn.Module):
    """torch's attention in the place of Megatron's, which keeps all scores if Transformer Engine isn't installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, *tensors: Tensor, **_: Any) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in tensors[:3])
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


def megatron() -> tuple[nn.Module, Losses]:
    from megatron.core import __version__, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    from tpbench.integrations.megatron import output_processor, patched

    store = torch.distributed.HashStore() if RANKS == 1 else None  # torchrun has one for several ranks
    torch.distributed.init_process_group("nccl" if GPU else "gloo", store=store, rank=RANK, world_size=RANKS)
    parallel_state.initialize_model_parallel(RANKS)
    if GPU:
        torch.cuda.set_device(RANK)
        random.model_parallel_cuda_manual_seed(0)
    else:  # Megatron asks for the current GPU
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=KV_HEADS, kv_channels=HEAD_DIM, gated_linear_unit=True, activation_func=nn.functional.silu,
        normalization="RMSNorm", add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, qk_layernorm=True,
        tensor_model_parallel_size=RANKS, use_cpu_initialization=not GPU, params_dtype=DTYPE, bf16=GPU,
        cross_entropy_fusion_impl="native",
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = Attention
    kinds = {"parallel_output": True, "share_embeddings_and_output_weights": True, "position_embedding_type": "rope"}
    model = GPTModel(config, layer, VOCAB, LENGTH, **kinds).to(DEVICE)
    tokens, positions = TOKENS.to(DEVICE), torch.arange(LENGTH, device=DEVICE).expand(BATCH, LENGTH)

    def loss_with(fused: bool = False, **options: Any) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            config.cross_entropy_loss_fusion = fused
            return model(tokens, positions, None, labels=tokens.roll(-1, 1), **options).mean()

        return loss

    losses: Losses = {
        "Megatron, unfused": (contextlib.nullcontext, loss_with()),
        "Megatron, fused": (contextlib.nullcontext, loss_with(fused=True)),
        "`patched()`": (patched, loss_with()),
        "`patched(in_place=True)`": (lambda: patched(in_place=True), loss_with()),
    }
    if __version__ >= "0.19":
        losses["`output_processor`"] = (contextlib.nullcontext, loss_with(output_processor=output_processor))
    return model, losses


def turn(loss: Callable[[], Tensor], adam: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the median time of a turn's steps in ms, and the peak memory in GiB."""
    times = []
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        start = time.perf_counter()
        loss().backward()
        adam.step()
        adam.zero_grad()
        if GPU:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times), torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0


def main(code: str) -> None:
    model, losses = {"transformers": transformers, "trl": trl, "megatron": megatron}[code]()
    model.train()
    adam = torch.optim.AdamW(model.parameters(), 1e-5, fused=GPU)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in losses}
    for number in range(-1, TURNS):  # the first turn compiles, and is left out
        for name in list(losses)[:: -1 if number % 2 else 1]:
            replaced, loss = losses[name]
            with replaced():
                measured = turn(loss, adam)
            turns[name] += [measured] if number >= 0 else []
    if RANK:
        return
    print(f"| loss | step, median of {TURNS} turns (least to largest) | peak memory |\n| :--- | ---: | ---: |")
    for name, measured_turns in turns.items():
        times, peaks = zip(*measured_turns, strict=True)
        print(f"| {name} | {median(times):.1f} ms ({min(times):.1f} to {max(times):.1f}) | {max(peaks):.2f} GiB |")


if __name__ == "__main__":
    main(*sys.argv[1:])
