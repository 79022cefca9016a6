#!/bin/bash
# A run on a TPU pod slice: the same command on every worker of it. Not run yet on a pod.
#   TPU_NAME=my-v5p-64 ZONE=us-east5-a examples/several_hosts_tpu_pod.sh --config=configs/qwen3_8b.py --config.run_dir=/shared/runs/8b
# Every worker has the checkout in ~/dcmdp-jax with its .venv (pip install -e '.[tpu,hub]') and the
# config's model in models/, and run_dir lies on a file system that all of them mount (Filestore, or a bucket through
# gcsfuse).
# The same command resumes a run that was stopped or killed.
set -euo pipefail
: "${TPU_NAME:?set TPU_NAME to the name of the slice}" "${ZONE:?set ZONE to its zone}"

# Quoted for the shell of the workers.
arguments=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all \
  --command="cd ~/dcmdp-jax && exec .venv/bin/python -m bin.train --config.hosts.coordinator=auto$arguments"
