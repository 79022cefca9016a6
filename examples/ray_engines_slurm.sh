#!/bin/bash
# The trainer on the first of 3 nodes with 8 GPUs each, vLLM under Ray on the others, under SLURM. Not run yet on a cluster.
#   sbatch examples/ray_engines_slurm.sh --config=configs/qwen3_8b.py --config.run_dir=/shared/runs/8b \
#     --config.rollout.vllm.replicas=16 --config.rollout.vllm.min_replicas=8 --config.rollout.vllm.memory_share=0.9 \
#     --config.rollout.vllm.python=$HOME/vllm/bin/python
# The environments of trainer and engine are those of BUILD.md, vLLM on GPUs, with the same Ray in both. Both, the checkout
# and run_dir lie on a file system that all nodes share; `python` and `ray` are the trainer's.
# The same command resumes a run that was stopped or killed.
#SBATCH --job-name=dcmdp-ray
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
# A node that fails ends its engines, not the job.
#SBATCH --no-kill
# Two minutes before the end SLURM sends SIGTERM to this script (B), which passes it on to the trainer alone: a trainer
# whose Ray is gone could not save.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

# Other users of the cluster reach Ray's ports, and run code as you if Ray takes their requests: every request needs this.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# This node's address as another node sees it; here its name may mean loopback. All lines are read: `head` would close the
# pipe, which ends the script where getent still writes.
others=$((SLURM_JOB_NUM_NODES - 1))
ip=$(srun --nodes=1 --ntasks=1 --exclude="$SLURMD_NODENAME" getent ahostsv4 "$SLURMD_NODENAME" | sed -n '1s/ .*//p')
address=$ip:$((20000 + SLURM_JOB_ID % 10000))

# The GPUs of this node are the trainer's.
ray start --head --node-ip-address="$ip" --port="${address##*:}" --num-gpus=0 --include-dashboard=false --disable-usage-stats

# A node whose Ray died joins again. SLURM ends this step, and what is left of Ray, when the script ends.
srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --no-kill --kill-on-bad-exit=0 bash -c '
  while sleep 5; do ray start --address="$0" --disable-usage-stats --block || true; done
' "$address" &

# The trainer refuses a cluster that is smaller than what it asks for.
python -c '
import sys, time, ray
ray.init(sys.argv[1], logging_level="ERROR")
while ray.cluster_resources().get("GPU", 0) < int(sys.argv[2]):
    time.sleep(5)
' "$address" $((others * SLURM_GPUS_ON_NODE))

python -m bin.train --config.rollout.vllm.placement=ray --config.rollout.vllm.address="$address" "$@" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM

# A signal ends `wait`, not the trainer.
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do
  code=0
  wait "$trainer" || code=$?
done
exit "$code"
