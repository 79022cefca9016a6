"""Extension of vLLM's workers: loads weights from shared memory, in place.

vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`) in every process that holds a part of the
model, and calls its methods by name. Imported by sidecar.py and by vLLM only.
"""

from __future__ import annotations

import ctypes
import functools
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from dcmdp_jax.engines.sidecar import manifest
from dcmdp_jax.engines.sidecar.shared_memory import attach
from dcmdp_jax.engines.vllm.routing import RoutingRecorder

_PR_SET_PDEATHSIG = 1

# A worker process of its own must not outlive the sidecar, whatever kills that.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

# Linux lets a process use AMX tiles only after it asked; vLLM's kernels don't ask and die of SIGILL (0.32).
if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
    raise RuntimeError("the kernel refuses AMX to this process")


class WeightReceiver:
    """Methods of a vLLM worker; `self` is the worker."""

    model_runner: Any

    def dcmdp_record_routing(self, on: bool) -> None:
        """Record the experts of all tokens from now on, or no longer; forgets what was recorded."""
        self._dcmdp_recorder.restart(on)

    def dcmdp_take_routing(self, requests: list[str]) -> list[np.ndarray]:
        """Return [tokens, layers, k] int16 for each of these requests, see `RoutingRecorder.take`."""
        return self._dcmdp_recorder.take(requests)

    @functools.cached_property
    def _dcmdp_recorder(self) -> RoutingRecorder:
        return RoutingRecorder(self.model_runner)

    def dcmdp_receive(self, path: str, size: int, listed: list[Any], policy_version: int) -> list[int]:
        """Load every tensor of a weight segment and return the checksums of what was handed to the model.

        Args:
            path: /proc path of the segment; `size` bytes.
            listed: the manifest.
            policy_version: of the checksums.
        """
        tensors = manifest.parse(listed, size)
        memory = _attached(path, size)
        sums: dict[str, int] = {}
        # The order of the manifest is not that of consumption: layers are loaded as the iterator yields them.
        weights = _handed_over(memory, tensors, policy_version, sums)
        if current_platform.is_cpu():
            # vLLM 0.32 on CPU packs experts when it makes their kernel: an old kernel keeps the old ones.
            for module in self.model_runner.get_model().modules():
                if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                    method.moe_kernel = None
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            # vLLM 0.32 on CPU leaves an output layer tied to the embedding in its old packed form when it reloads.
            for module in self.model_runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        if missing := [tensor.name for tensor in tensors if tensor.name not in sums]:
            raise RuntimeError(f"the engine did not take {missing[0]} and {len(missing) - 1} more tensors")
        return [sums[tensor.name] for tensor in tensors]

    def dcmdp_scale_logits(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1 ends it.

        vLLM's prompt log-probs know no temperature. Division in float32 and log-softmax after it are what its sampler
        does with the logits of a sampled token.
        """
        model = self.model_runner.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature != 1.0:
            plain = model.compute_logits
            model.__dict__["compute_logits"] = lambda *a, **k: plain(*a, **k).to(torch.float32).div_(temperature)


@functools.cache
def _attached(path: str, size: int) -> np.ndarray:
    """One mapping for all pushes: mapping each page again costs as much as reading it."""
    return attach(path, size)


def _handed_over(
    memory: np.ndarray, tensors: list[manifest.Tensor], policy_version: int, sums: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of a segment, as a view of it. Its checksum is added to `sums` as it is taken."""
    for tensor in tensors:
        data = memory[tensor.offset : tensor.offset + tensor.num_bytes]
        sums[tensor.name] = manifest.checksum(data, policy_version)
        yield tensor.name, torch.from_numpy(data).view(getattr(torch, tensor.dtype)).view(tensor.shape)
