"""The experts that vLLM sends each token to. Imported by sidecar.py and worker.py only.

vLLM's own switch (`enable_return_routed_experts`, 0.32) needs a model runner that its CPU build does not have: there
the worker records what its routers choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform


class Routing:
    """The sidecar's side: asks vLLM, or the workers' recorders, for the experts of completions that have ended."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Read, and in the CPU build take out, `enable_return_routed_experts` of vLLM's arguments."""
        self._asked = arguments.get("enable_return_routed_experts", False)
        self._recorded = self._asked and current_platform.is_cpu()
        if self._recorded:
            del arguments["enable_return_routed_experts"]

    @contextlib.contextmanager
    def recorded(self, llm: Any) -> Iterator[None]:
        """Record what is sampled inside."""
        if not self._recorded:
            yield
            return
        llm.collective_rpc("dcmdp_record_routing", args=(True,))
        try:
            yield
        finally:
            llm.collective_rpc("dcmdp_record_routing", args=(False,))

    def arrays(self, llm: Any, outputs: Sequence[Any]) -> dict[str, np.ndarray]:
        """ "routed_experts" [tokens, layers, k] int16 of completions that have ended, one after the other.

        Of each its prompt's tokens and its own but the last. Nothing without completions, or if nobody asked.
        """
        if not self._asked or not outputs:
            return {}
        if self._recorded:
            # All workers route alike.
            routed = llm.collective_rpc("dcmdp_take_routing", args=([output.request_id for output in outputs],))[0]
        else:
            routed = [output.outputs[0].routed_experts for output in outputs]
        return {"routed_experts": np.concatenate(routed).astype(np.int16)}


class RoutingRecorder:
    """Follows a model runner's forward passes. Its prefix cache must be off: cached tokens are not computed."""

    def __init__(self, model_runner: Any) -> None:
        """Listen to the routers of all layers and to each forward pass.

        Args:
            model_runner: of a vLLM worker, with a mixture of experts.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner = model_runner
        self._on = False
        self._layers: dict[int, torch.Tensor] = {}
        # Request -> (position of the first token, [tokens, layers, k]) of each forward pass.
        self._passes: dict[str, list[tuple[int, np.ndarray]]] = {}
        for module in model_runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(lambda experts, layer=module.layer_id: self._note(layer, experts))
        self._execute = model_runner.execute_model
        model_runner.execute_model = self._execute_model

    def restart(self, on: bool) -> None:
        """Forget everything, and record from now on or not."""
        self._on = on
        self._layers, self._passes = {}, {}

    def take(self, requests: list[str]) -> list[np.ndarray]:
        """Return what was recorded of finished requests, and forget it.

        Args:
            requests: identifiers as the caller gave them; vLLM appends a suffix of its own to each.

        Returns:
            [tokens, layers, k] int16 for each, all its tokens but the last, which is not read.
        """
        named = {name.partition("-")[0]: name for name in self._passes}
        return [_joined(self._passes.pop(named[request])) for request in requests]

    def _note(self, layer: int, experts: torch.Tensor) -> None:
        if self._on:
            self._layers[layer] = experts.to(torch.int16)

    def _execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        starts = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        output = self._execute(scheduled, *args, **options)
        if self._on and scheduled.total_num_scheduled_tokens:
            experts = torch.stack([self._layers[layer] for layer in sorted(self._layers)], dim=1).numpy()
            begin = 0
            for request in self._runner.input_batch.req_ids:
                if count := scheduled.num_scheduled_tokens.get(request, 0):
                    self._passes.setdefault(request, []).append((starts[request], experts[begin : begin + count]))
                    begin += count
            if begin != scheduled.total_num_scheduled_tokens:
                raise RuntimeError(f"experts of {begin} tokens, {scheduled.total_num_scheduled_tokens} were computed")
        return output


def _joined(passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """One array of all passes. Where a preempted request is computed again, what its tokens were sampled with stays."""
    size = max(start + len(experts) for start, experts in passes)
    joined = np.full((size, *passes[0][1].shape[1:]), -1, np.int16)
    for start, experts in reversed(passes):
        joined[start : start + len(experts)] = experts
    return joined
