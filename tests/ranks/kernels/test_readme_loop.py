"""The training loop of the README, with a tiny model: its losses are those of torch."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.support.command import ROOT

README = (ROOT / "README.md").read_text()
LOOP = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "EntropyLoss" in block)


def test_the_training_loop_of_the_readme_trains_as_torch_does() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    vocab = 96
    batches = [
        (
            torch.randn(2, 3, 8, generator=generator).to(device),
            torch.randint(vocab, (2, 3), generator=generator).to(device),
        )
        for _ in range(3)
    ]
    losses: dict[str, list[float]] = {"tpbench": [], "torch": []}
    for name in losses:
        torch.manual_seed(1)
        model = torch.nn.Linear(8, vocab, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if name == "torch":
            for tokens, labels in batches:
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(float(loss))
            continue
        names: dict[str, Any] = {
            "tp_group": None,
            "tp_rank": 0,
            "tp": 1,
            "vocab": vocab,
            "batches": batches,
            "model": model,
        }
        loop = LOOP.replace("    optimizer.step()", "    seen.append(float(loss))\n    optimizer.step()")
        exec(loop, {**names, "optimizer": optimizer, "seen": losses[name]})
    torch.testing.assert_close(losses["tpbench"], losses["torch"], rtol=1e-5, atol=1e-6)
