"""The interface for variants from outside this package: functions in your own file or package.

A variant of the entropy loss is a function that prepares an iteration on this rank's shard and returns it as a `Step`:

    from tpbench.api import EntropyLoss, Output, Shard, Step, variant

    def fast_tp(problem: EntropyLoss, shard: Shard) -> Step:
        def run() -> Output:
            ...
            return Output(loss, row_loss, grad)

        return Step(run, bytes_communicated=...)

`python -m tpbench variant=my_loss.py:fast_tp` runs it. `@variant(...)` is optional: it declares options, required
packages and refusals. The modules `tpbench.api.linear_loss`, `.embedding_grad`, `.tp_block` and `.train_step` have the
types of the other workloads, and `tpbench.api.models` those of models of your own. `python -m tpbench new my_loss.py`
writes a file to start from.

The names of this package and the fields of its types stay valid; a test freezes them.
"""

from tpbench.api.entropy_loss import IGNORED as IGNORED
from tpbench.api.entropy_loss import EntropyLoss as EntropyLoss
from tpbench.api.entropy_loss import Output as Output
from tpbench.api.entropy_loss import Shard as Shard
from tpbench.api.entropy_loss import Step as Step
from tpbench.api.entropy_loss import variant as variant
