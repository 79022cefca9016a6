"""Settings of the vLLM processes."""

import dataclasses

from dcmdp_jax.fields import setting


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The vLLM process, used with `rollout.engine=vllm`.

    Attributes:
        python: Python interpreter that has vLLM. Empty: the trainer's, or each node's.
        tensor_parallel_size: Devices that each layer is split over.
        placement: local: processes of this machine. ray: actors of a Ray cluster.
        address: The Ray cluster: auto, HOST:PORT, ray://HOST:PORT. Empty: this machine alone.
        min_replicas: With Ray: fewer for start_timeout_s end the run.
        replicas: Data-parallel processes, each with tensor_parallel_size devices of its own. Prompt
            p goes to replica p mod replicas; all load one copy of the weights. 0: as many as the
            GPUs hold, 1 on a CPU or with Ray.
        visible_devices: GPUs of the processes, as CUDA_VISIBLE_DEVICES. Empty: the trainer's GPUs,
            shared.
        memory_share: Share of each of its GPUs. On a shared GPU the trainer gets the rest less a
            tenth. Source: ours.
        sleep: vLLM's sleep mode, which leaves shared GPUs to the trainer while nothing is sampled.
            0: off. 1: weights move to host memory. 2: weights are dropped, and loaded again. Frees
            nothing in the CPU build. Source: ours.
        kv_cache_gib: Size of each replica's key-value cache. 0: on a GPU twice what max_rows need
            where they need 1 GiB at most, else what memory_share leaves; on a CPU what they need,
            at most a third of the free memory.
        cpu_threads: Threads of the CPU build. More than one is slow on a machine that does anything
            else.
        engine_args: Further arguments of vllm.LLM as a JSON object, such as {"block_size": 64}.
        adapters: Sync LoRA's A and B alone, beside a base that is loaded once (docs/lora.md).
            False: merged.
        start_timeout_s: Longest start of an engine; the first that takes longer ends the run, a
            later one is tried again.
        probe_tolerance: Largest mean |difference| of log-probs between trainer and engine on fixed
            sequences after each weight sync; above it the weight sync failed. 0: 0.01 for float32,
            0.2 for float16, 1 for bfloat16, 4 for 8-bit weights or cache. Source: ours.
    """

    python: str = setting("", free=True)
    tensor_parallel_size: int = setting(1, unit="devices", minimum=1)
    placement: str = setting("local", choices=("local", "ray"), free=True)
    address: str = setting("", free=True)
    min_replicas: int = setting(1, unit="replicas", minimum=1, free=True)
    replicas: int = setting(1, unit="processes", minimum=0, free=True)
    visible_devices: str = setting("", free=True)
    memory_share: float = setting(0.4, minimum=0.01, maximum=1, free=True)
    sleep: int = setting(0, minimum=0, maximum=2, free=True)
    kv_cache_gib: float = setting(0.0, unit="GiB", minimum=0, free=True)
    cpu_threads: int = setting(1, unit="threads", minimum=1, free=True)
    engine_args: str = setting("")
    adapters: bool = setting(False)
    start_timeout_s: float = setting(600.0, unit="seconds", minimum=1, free=True)
    probe_tolerance: float = setting(0.0, unit="nats", minimum=0, maximum=20, free=True)

    @property
    def known_replicas(self) -> int:
        """`replicas`, or 1 where it is left to the number of GPUs."""
        return max(1, self.replicas)
