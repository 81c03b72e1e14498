"""A row to write, and a place to look at what was written."""

import datetime

import pytest

START = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


@pytest.fixture
def row():
    """Makes a plausible row; keywords change it."""

    def make(seconds=0, **changes):
        moment = START + datetime.timedelta(seconds=seconds)
        plain = {
            "workload": "entropy_loss", "variant": "triton_tp", "status": "ok", "key": "k", "cell": 0,
            "tokens": 4096, "vocab": 32768, "tp_size": 2, "dp_size": 1, "loss": "cross_entropy", "dtype": "bfloat16",
            "block_cap": "auto", "device": "cuda", "gpu_name": "NVIDIA H200", "interpreted": False,
            "time_ms": 0.227, "samples_ms": [0.2, 0.227, 0.3], "started_at": moment, "finished_at": moment,
            "seed": 7, "compile": False, "block_used": 4096,
        }  # fmt: skip
        return plain | changes

    return make
