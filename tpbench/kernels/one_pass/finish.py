"""The end of a launch: the last program sums the row losses and advances the epoch."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.ptx import await_arrivals, barrier
from tpbench.kernels.one_pass.rows import sum_of_losses


@gluon.jit
def finish(row_losses, loss, mailbox, n_rows, epoch, scales, inverse, SPEC: gl.constexpr):
    """In the last program, which has the fewest rows: sum the row losses in one order, and advance the epoch.

    It waits for programs that do not wait for it.
    """
    if gl.program_id(0) == gl.num_programs(0) - 1:
        await_arrivals(mailbox.control + 1, gl.num_programs(0))
        barrier()
        if SPEC.REDUCE:
            gl.store(loss, sum_of_losses(row_losses, n_rows, SPEC) * (scales.loss_scale * inverse))
        gl.store(mailbox.control + 1, 0)
        if SPEC.SLOTS > 0:
            gl.store(mailbox.control, epoch)
