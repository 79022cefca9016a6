#!/bin/bash
# A run on 4 nodes with 8 GPUs each under SLURM: one process on each node. Not run yet on a cluster.
#   sbatch examples/several_hosts_slurm.sh --config=configs/qwen3_30b_a3b.py --config.run_dir=/shared/runs/a3b \
#     --config.rollout.vllm.tensor_parallel_size=4 --config.rollout.vllm.replicas=2 \
#     --config.rollout.vllm.python=$HOME/vllm/bin/python
# The environments of trainer and engine are those of BUILD.md, vLLM on GPUs. The checkout and run_dir lie on a file system that all nodes share.
# The same command resumes a run that was stopped or killed.
#SBATCH --job-name=dcmdp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Two minutes before the end SLURM sends SIGTERM to the processes, which save and leave.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

# All lines are read: `head` would close the pipe, which ends the script where scontrol still writes.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# Any free port; jobs that share a node must not share it.
port=$((20000 + SLURM_JOB_ID % 10000))

# SLURM_PROCID has its value in the tasks only, so bash -c reads it there.
# A process that fails takes the others with it within hosts.timeout_s by itself: no --kill-on-bad-exit is needed.
srun --kill-on-bad-exit=0 bash -c '
  exec python -m bin.train \
    --config.hosts.coordinator="$0" \
    --config.hosts.processes="$SLURM_NTASKS" \
    --config.hosts.process="$SLURM_PROCID" \
    "$@"
' "$first_node:$port" "$@"
