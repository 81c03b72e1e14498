"""The launching side imports neither torch nor transformers: each takes seconds, and a launcher must not hold a GPU."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.command import environment

MODELS = "tiny_qwen3,./folder"
PROBE = """
import sys
from tpbench.__main__ import main
main()
heavy = {"torch", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_a_plan_of_models_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """The models are a choice of conf/model and a folder."""
    (tmp_path / "folder").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    line = ["-m", "variant=fsdp", "shape=tiny_train_dp2", f"model={MODELS}", "device=cpu"]
    done = subprocess.run([sys.executable, "-c", PROBE, *line, "dry_run=true"], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 cells, 2 to run" in done.stdout
