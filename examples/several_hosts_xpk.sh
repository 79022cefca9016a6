#!/bin/bash
# The run of several_hosts_gke.yaml on a cluster that XPK made: XPK writes the JobSet. Not run yet on a cluster; XPK 1.16 was
# asked for a dry run.
#   CLUSTER=my-gpus PROJECT=my-project ZONE=us-central1-a IMAGE=REGION-docker.pkg.dev/my-project/dcmdp/dcmdp:latest \
#     examples/several_hosts_xpk.sh --config=configs/qwen3_30b_a3b.py --config.run_dir=/shared/runs/a3b \
#     --config.rollout.vllm.tensor_parallel_size=4 --config.rollout.vllm.replicas=2 \
#     --config.rollout.vllm.python=/opt/vllm/bin/python
# The storage dcmdp-runs is a file system that all nodes mount at /shared (xpk storage attach dcmdp-runs \
# --type=gcpfilestore --mount-point=/shared ...). When a pod fails, all end within hosts.timeout_s; the JobSet starts all
# again, and the run resumes.
set -euo pipefail
: "${CLUSTER:?set CLUSTER to the name of the cluster}" "${PROJECT:?set PROJECT}" "${ZONE:?set ZONE}" "${IMAGE:?set IMAGE}"

# Quoted for the shell of the pods. The variables are XPK's. exec: the process itself gets the pod's SIGTERM.
hosts='--config.hosts.coordinator=$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT'
hosts+=' --config.hosts.processes=$NNODES --config.hosts.process=$NODE_RANK'
arguments=$(printf ' %q' "$@")
# A trainer that lost another host ends with 1. By itself XPK starts again only after a signal; 2 is wrong input.
xpk workload create \
  --cluster="$CLUSTER" \
  --project="$PROJECT" \
  --zone="$ZONE" \
  --workload=dcmdp \
  --device-type=h200-141gb-8 \
  --num-nodes=4 \
  --docker-image="$IMAGE" \
  --storage=dcmdp-runs \
  --max-restarts=20 \
  --restart-on-exit-codes=1 \
  --termination-grace-period-seconds=120 \
  --command="exec python -m bin.train $hosts$arguments"
