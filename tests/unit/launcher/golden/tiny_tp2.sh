python \
  -m \
  tpbench.worker.torchrun \
  --nnodes=1 \
  --nproc-per-node=2 \
  --rdzv-backend=tpbench \
  --rdzv-id=20260101-000000-abcdef-3 \
  --local-addr=127.0.0.1 \
  --max-restarts=0 \
  --monitor-interval=0.1 \
  --log-dir=/runs/20260101-000000-abcdef/3 \
  --redirects=3 \
  -m \
  tpbench.worker.rank \
  /runs/20260101-000000-abcdef/3/cell.json
