"""The interface for code from outside this package: operations and variants in your own file.

An operation is a `Workload` with a problem, inputs, a reference, costs and variants. `python -m tpbench new
my_operation.py --workload new` writes a whole one, and `python -m tpbench docs own_operation` explains it.

A variant of the entropy loss is a function `fast_tp(problem: EntropyLoss, shard: Shard) -> Step` that prepares an
iteration on this rank's shard. `python -m tpbench new my_loss.py` writes one, and `python -m tpbench
variant=my_loss.py:fast_tp` runs it. `@variant(...)` is optional: it declares options, required packages and refusals.
The modules `tpbench.api.linear_loss`, `.embedding_grad`, `.tp_block` and `.train_step` have the types of the other
workloads, and `tpbench.api.models` those of models of your own.

The names of this package and the fields of its types stay valid; a test freezes them.
"""

from tpbench.api.entropy_loss import IGNORED as IGNORED
from tpbench.api.entropy_loss import EntropyLoss as EntropyLoss
from tpbench.api.entropy_loss import Output as Output
from tpbench.api.entropy_loss import Shard as Shard
from tpbench.api.entropy_loss import Step as Step
from tpbench.api.entropy_loss import variant as variant
from tpbench.measure.session import Context as _Context
from tpbench.measure.session import Costs as Costs
from tpbench.measure.session import IterationSchedule as IterationSchedule
from tpbench.measure.session import Session as Session
from tpbench.measure.session import Verdict as Verdict
from tpbench.settings import setting as setting
from tpbench.workloads import Workload as Workload

Rank = _Context
"""A rank's place, its device and the seed of its inputs."""
