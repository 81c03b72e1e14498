"""The choice of block caps."""

import pytest

from tpbench.kernels.block_caps import measured_cap, measured_caps


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"])
@pytest.mark.parametrize("algorithm", ["two_reads", "two_kernels", "one_read"])
def test_auto_is_the_narrowest_measured_width_that_fits(algorithm: str, loss: str) -> None:
    caps = {int(columns): cap for columns, cap in measured_caps()[algorithm][loss].items()}
    for columns, cap in caps.items():
        assert measured_cap(algorithm, loss, columns) == measured_cap(algorithm, loss, columns - 1) == cap
    assert measured_cap(algorithm, loss, 1) == caps[min(caps)]
    assert measured_cap(algorithm, loss, 10**7) == caps[max(caps)]
