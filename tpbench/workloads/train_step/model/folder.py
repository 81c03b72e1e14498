"""Find the folder of a model: a local one, or one in the local cache of Hugging Face. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from tpbench import packages
from tpbench.settings import JobError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def model_folder(model_dir: str) -> Path:
    """Return the folder that `model_dir` names, by its path or by an id of Hugging Face such as Qwen/Qwen3-32B.

    Raises JobError for an id that the local cache does not hold.
    """
    folder = Path(model_dir)
    if folder.exists() or not _ID.fullmatch(model_dir):
        return folder
    if packages.installed("huggingface_hub"):
        from huggingface_hub import constants, try_to_load_from_cache

        file = try_to_load_from_cache(model_dir, "config.json")
        if isinstance(file, str):
            return Path(file).parent
        searched = f"nor in the cache of Hugging Face ({constants.HF_HUB_CACHE})"
    else:
        searched = "and huggingface_hub, which knows the cache of Hugging Face, is not installed"
    raise JobError(
        f"model={model_dir} is neither a folder nor in conf/model {searched}. tpbench downloads nothing: "
        f"`hf download {model_dir} config.json` puts the model's configuration into the cache"
    )
