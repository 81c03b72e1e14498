"""The phases of a step."""

from __future__ import annotations

from collections.abc import Callable

PHASES = ("forward", "backward", "optimizer")

MarkPhase = Callable[[str], None]
"""Callback at the beginning of a phase, with its name."""


def ignore_phase(phase: str) -> None:
    """Do nothing at the beginning of a phase."""
