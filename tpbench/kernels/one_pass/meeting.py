"""A meeting of ranks before the persistent kernel, which occupies the whole GPU until all ranks have sent their states.

One warp waits here for late ranks, and leaves the multiprocessors to other streams. Two H100s, three bf16 products of
4096^3 on another stream of the rank that waits 1 ms, for 4096 tokens and 131072 columns: 0.606 ms with a meeting,
1.735 without, 0.784 beside NCCL's all-gather. So long launches begin with a meeting. It costs one more launch and one
transfer between GPUs, too much for short ones.
"""

import triton
import triton.language as tl

LEAST_NUMBERS = 2**29
"""Least logits, target logits and gradients of a launch that begins with a meeting: 0.3 ms in bf16 on an H100."""

_MEET = tl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 seen;
    .reg .b64 began, now;
    setp.eq.b32 p, $5, 0;
    @p bra DONE;
    st.relaxed.sys.global.b32 [$1], $3;
    setp.eq.b32 p, $6, 0;
    @p bra DONE;
    mov.u64 began, %globaltimer;
    AGAIN: ld.relaxed.sys.global.b32 seen, [$2];
    sub.s32 seen, seen, $3;
    setp.ge.s32 p, seen, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    sub.s64 now, now, began;
    setp.lt.s64 p, now, $4;
    @p bra AGAIN;
    DONE: mov.b32 $0, 0;
    }"""
)


@triton.jit(do_not_specialize=["rank", "place", "ahead", "limit_ns"])
def meeting_kernel(mailbox, rank, place, ahead, limit_ns, WORLD: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks the epoch of a launch, and wait until all of them have told it or a later one.

    ahead: 1 before the launch. 0 after it: then the kernel waits only if this rank's programs left rows. mailbox:
    `launch.Mailbox`. place: of the ranks' words of 8 bytes in each rank's buffer. RANKS: WORLD filled up to a power of
    two. A wait ends after limit_ns: the next kernel waits, too, and says so.
    """
    peer = tl.arange(0, RANKS)
    exists = peer < WORLD
    there = tl.load(mailbox.peers + peer, mask=exists, other=0) + (place + rank) * 8
    here = (mailbox.words + (place + peer)).to(tl.int64)
    epoch = tl.load(mailbox.control) + ahead + peer * 0
    waits = tl.load(mailbox.control + 2) + ahead + peer * 0
    limit = peer.to(tl.int64) * 0 + limit_ns
    tl.inline_asm_elementwise(
        _MEET, "=r,l,l,r,l,r,r", [there, here, epoch, limit, exists.to(tl.int32), waits], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
