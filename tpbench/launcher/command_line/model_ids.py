"""Ids of Hugging Face's models for the files of conf/model."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    **{f"Qwen/Qwen3-{size}B": f"qwen3_{size.replace('.', 'p')}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
    "meta-llama/Llama-3.2-1B": "llama3_1b",
    **{f"meta-llama/Llama-3.1-{size}B": f"llama3_{size}b" for size in (8, 70, 405)},
}


def file_of(choice: str) -> str | None:
    """Return the name of the file in conf/model that has the sizes of a model, given by its id, or None.

    A folder of this name takes precedence.
    """
    return None if Path(choice).is_dir() else _FILES.get(choice)
