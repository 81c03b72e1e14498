"""The composition of a sweep's cells: equal to Hydra's own, without reading a file twice."""

from __future__ import annotations

from collections import Counter

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import OmegaConf

from tests.support.command import ROOT
from tests.support.composed_jobs import composed
from tpbench.launcher.hydra_internals import SweepComposer
from tpbench.settings import JobError


@pytest.fixture
def composer(monkeypatch: pytest.MonkeyPatch) -> SweepComposer:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    OmegaConf.register_new_resolver("tpbench.sweep_id", lambda: "id", use_cache=True, replace=True)
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        return SweepComposer(
            loader, loader.load_configuration("config", ["hydra.sweep.dir=${nothing}"], RunMode.MULTIRUN)
        )


CELLS = (
    (),
    ("variant=pytorch_gather", "shape=v131k_tp8", "seed=3"),
    ("variant=pytorch_gather", "shape=v131k_tp8", "seed=4", "++table_rows=5"),
    ("variant=pytorch_tp_manual_compiled", "block_cap='4096'", "loss=reverse_kl", "measure=quick"),
    ("variant=fsdp_dtensor", "shape=tiny_train_dp2_tp2", "model=qwen3_8b", "min_iterations=7"),
    ("variant=sparse_auto", "shape=bigram_w2", "dp_size=3", "~seed"),
)


def test_cells_are_those_that_hydra_composes(composer: SweepComposer) -> None:
    ours = [composer.values(lines, index) for index, lines in enumerate(CELLS)]
    assert ours == [composed(*lines) for lines in CELLS]


def test_a_file_is_read_once_for_all_cells(composer: SweepComposer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    (conf,) = (source for source in composer.files.get_sources() if source.path == str(ROOT / "conf"))
    load = conf.load_config

    def counted(config_path: str) -> ConfigResult:
        read[config_path] += 1
        return load(config_path)

    monkeypatch.setattr(conf, "load_config", counted)
    for index, shape in enumerate(("tiny_tp2", "v131k_tp8", "tiny_tp2")):
        assert composer.values([f"shape={shape}", f"tokens={index + 1}"], index)["tokens"] == index + 1
    assert max(read.values()) == 1, read
    assert {"shape/tiny_tp2", "shape/v131k_tp8", "variant/triton_tp"} <= {name.removesuffix(".yaml") for name in read}


def test_values_may_refer_to_others_and_to_hydras_own_configuration(composer: SweepComposer) -> None:
    assert composer.values(["output_dir=o-${dp_size}", "dp_size=3"], 0)["output_dir"] == "o-3"
    line = "output_dir=o-${hydra:job.num}-${hydra:runtime.choices.loss}"
    assert composer.values([line, "loss=forward_kl"], 3)["output_dir"] == "o-3-forward_kl"
    with pytest.raises(JobError, match="refers to another one that cannot be found"):
        composer.values(["seed=${nothing}"], 0)
    with pytest.raises(ConfigCompositionException, match="Could not override 'tokns'"):
        composer.values(["tokns=4"], 0)
