#!/usr/bin/env bash
# Train with DeepSpeed AutoTP: DP_SIZE=2 TP_SIZE=4 scripts/run_autotp.sh [FIELD=VALUE...]. Default: one replica, two ranks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment"
environment "[report,train]"
exec "$venv/bin/python" -m tpbench variant=autotp shape=qwen3_0p6b_tp2 \
    tp_size="${TP_SIZE:-2}" dp_size="${DP_SIZE:-1}" "$@"
