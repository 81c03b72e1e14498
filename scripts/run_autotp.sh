#!/usr/bin/env bash
# Train Qwen3-32B with DeepSpeed AutoTP, on one replica of four ranks: scripts/run_autotp.sh [FIELD=VALUE...]
# Other meshes and models: DP_SIZE=2 TP_SIZE=4 MODEL_NAME=Qwen/Qwen3-8B scripts/run_autotp.sh
# On small machines: TP_SIZE=2 scripts/run_autotp.sh num_layers=4; without a GPU: TP_SIZE=2 MODEL_NAME=tiny_qwen3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment"
environment "[report,train]"
exec "$venv/bin/python" -m tpbench variant=autotp shape=qwen3_32b_tp4 model="${MODEL_NAME:-Qwen/Qwen3-32B}" \
    tp_size="${TP_SIZE:-4}" dp_size="${DP_SIZE:-1}" "$@"
