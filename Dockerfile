# Two images. None has been built yet (see "Not run" in BUILD.md).
#   docker build --target cpu -t dcmdp:cpu .          docker run --rm -v "$PWD/runs:/work/runs" dcmdp:cpu
#   docker build --target cuda -t dcmdp:cuda .        docker run --rm --gpus all --shm-size=64g dcmdp:cuda dcmdp --help
FROM python:3.12-slim AS base
WORKDIR /work
# git: the commit in starts.jsonl. A compiler: torch.compile and Triton of vLLM on GPUs.
RUN apt-get update && apt-get install --yes --no-install-recommends git g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY dcmdp_jax dcmdp_jax
COPY bin bin
COPY examples examples

# The embedded engine; no vLLM.
FROM base AS cpu
RUN pip install --no-cache-dir --editable '.[hub,tasks,wandb,trackio]'
CMD ["dcmdp", "train", "--config=demo"]

# The trainer, and vLLM in an environment of its own: both bring CUDA libraries of the same names.
#   --config.rollout.vllm.python=/opt/vllm/bin/python
FROM base AS cuda
# ray[default]: KubeRay asks its dashboard. Both environments have the same Ray.
RUN pip install --no-cache-dir --editable '.[cuda,ray,hub,tasks,wandb,trackio]' 'ray[default]'
RUN python -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir 'vllm>=0.32,<0.34' msgpack \
    "ray==$(ray --version | sed 's/.* //')"
CMD ["dcmdp", "train", "--config=qwen3_8b:debug"]
