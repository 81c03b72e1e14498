#!/usr/bin/env python3
"""Train a toy language model whose vocabulary is sharded over the ranks of a process group.

Run torchrun --nproc-per-node=2 scripts/training_loop.py. tpbench/docs/training_loop.md explains the code. Each line has
the loss of a step, and the loss of the same training in one process with torch's cross-entropy.
"""

from __future__ import annotations

import os
import sys

import _checkout  # noqa: F401  finds the package below
import torch
import torch.distributed as dist
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; the kernels then run on a CPU

from tpbench.kernels import EntropyLoss

VOCAB, WIDTH, BATCH, SEQUENCE, STEPS, MICRO_BATCHES = 96, 16, 2, 8, 6, 2
IGNORED = -100


def train(group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Return the loss of each step. Each rank of the group has its columns of the vocabulary; None: all columns."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    vocab_start, vocab_end = rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks  # also if the ranks don't divide it
    body, head, optimizer = model(slice(vocab_start, vocab_end), device)

    def sum_over_ranks(grad: Tensor) -> Tensor:
        total = grad.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    loss_function = EntropyLoss(
        group=group,
        vocab_start=vocab_start,
        vocab_size=VOCAB,
        ignore_index=IGNORED,
        reduction="sum",  # the mean is over all micro-batches of a step
        exchange="yielding",  # collectives of FSDP may run at the same time
        in_place=True,  # the gradient overwrites the logits
    )
    losses = []
    for step in range(STEPS):
        micro_batches = batches(step, device)
        label_count = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
        total = torch.zeros((), device=device)
        for tokens, labels in micro_batches:
            hidden = body(tokens)  # (batch, sequence, width): equal on all ranks
            hidden.register_hook(sum_over_ranks)  # each rank has the gradient from its own columns only
            logits = head(hidden)  # (batch, sequence, vocab / ranks): this rank's columns
            loss = loss_function(logits.flatten(0, 1), labels.flatten()) / label_count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def train_with_torch(device: torch.device) -> list[float]:
    """Return the loss of each step in one process, with torch's cross-entropy over the whole vocabulary."""
    body, head, optimizer = model(slice(None), device)
    losses = []
    for step in range(STEPS):
        tokens, labels = (torch.cat(parts) for parts in zip(*batches(step, device), strict=True))
        logits = head(body(tokens)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def model(columns: slice, device: torch.device) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return the layers below the vocabulary, the linear layer to these columns of it, and the optimizer of both."""
    torch.manual_seed(0)  # equal weights on all ranks
    body = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(head.weight[columns].detach().clone())
    body.to(device), head.to(device)
    return body, head, torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.05)


def batches(step: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a step: tokens and labels, each (batch, sequence), equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for index in range(MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
        labels = (tokens + 1) % VOCAB
        labels[:, SEQUENCE - 1 - index :] = IGNORED  # padding; each micro-batch has another number of labels
        made.append((tokens.to(device), labels.to(device)))
    return made


def main() -> None:
    """Print the losses of the sharded training beside those of one process."""
    device, group = torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    if "RANK" in os.environ:  # set by torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    sharded = train(group, device)
    if group is None or group.rank() == 0:
        for step, (loss, expected) in enumerate(zip(sharded, train_with_torch(device), strict=True)):
            print(f"step {step}: loss {loss:.5f}, torch in one process {expected:.5f}")
    if group is not None:
        sys.stdout.flush()
        os._exit(0)  # the results are printed, and an orderly end of gloo's threads may abort


if __name__ == "__main__":
    main()
