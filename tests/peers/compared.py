"""Inputs, a tiny model and comparisons of losses and gradients, for all tests beside other training codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

VOCAB = 96
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Relative to the largest number of the tensor: codes round in other places."""


def assert_close(ours: Any, theirs: Any, dtype: torch.dtype = torch.float32, what: str = "") -> None:
    """AssertionError unless two tensors, or two sequences of them, are equal up to the rounding of `dtype`."""
    if isinstance(ours, (list, tuple)) and not isinstance(ours[0], float):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(one, other, dtype, f"{what}[{index}]")
        return
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    assert ours.shape == theirs.shape, what
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)
    assert error <= TOLERANCE[dtype], f"{what}: {error:.2e}"


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of fresh copies of `inputs`, and their gradients."""
    copies = [each.detach().clone().requires_grad_() for each in inputs]
    loss = function(*copies)
    loss.backward()
    return loss.detach(), [each.grad for each in copies]  # type: ignore[misc]


def ten_steps(parameters: Iterable[Tensor], loss_of: Callable[[], Tensor], rate: float = 1e-2) -> list[float]:
    """Return the losses of ten steps of Adam."""
    adam, history = torch.optim.Adam(parameters, rate), []
    for _ in range(10):
        loss = loss_of()
        adam.zero_grad()
        loss.backward()
        adam.step()
        history.append(loss.item())
    return history


def weighted(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a sum in which each row has a factor of its own."""
    rows = torch.linspace(-1, 2, logprobs.numel())
    return (logprobs.flatten() * rows).sum() + (0 if entropy is None else (entropy.flatten() * rows.flip(0)).sum())


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def labels(*shape: int, ignored: float = 0.3, seed: int = 1) -> Tensor:
    """Return labels of which a share is -100."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, VOCAB, shape, generator=generator)
    return values.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiny_model(**changes: Any) -> Any:
    """Return a Qwen3 of two layers with random weights, the same for each call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, max_position_embeddings=64, **sizes, **heads, **changes))


def tiny_tokenizer() -> Any:
    """Return a tokenizer whose words are numbers, with the tokens that trainers need."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {**{str(number): number for number in range(VOCAB - 2)}, "<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="0")
