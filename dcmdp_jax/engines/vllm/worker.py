"""Extension of vLLM's workers: loads weights from shared memory, records experts of each token.

vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`) in every process that
holds a part of the model, and calls its methods by name. Imported by sidecar.py and by vLLM only.
"""

import collections
import contextlib
import ctypes
import functools
import inspect
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from dcmdp_jax.engines.sidecar import segments

_PR_SET_PDEATHSIG = 1

# A worker process of its own must not outlive the sidecar, whatever kills that.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

# Linux lets a process use AMX tiles only after it asked; vLLM's kernels don't ask and die of SIGILL
# (0.32).
if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
    raise RuntimeError("the kernel refuses AMX to this process")


class WeightReceiver:
    """Methods of a vLLM worker; `self` is the worker."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def dcmdp_record_routing(self, on: bool) -> None:
        """Record the experts of all tokens from now on, or no longer; forgets what was recorded."""
        self._dcmdp_recorder.restart(on)

    def dcmdp_take_routing(self, requests: list[str]) -> list[np.ndarray]:
        """[tokens, layers, k] int16 for each of these requests, see `RoutingRecorder.take`."""
        return self._dcmdp_recorder.take(requests)

    def dcmdp_observe(self, names: list[str]) -> dict[str, np.ndarray]:
        """Record what these modules read and give from now on, until the next call.

        Returns:
            What was recorded before and is now forgotten: "NAME read" and "NAME gave", [tokens,
            width] float32 each, of the modules that were called.
        """
        for handle in self.__dict__.pop("_dcmdp_handles", ()):
            handle.remove()
        previous = self.__dict__.pop("_dcmdp_observed", {})
        self._dcmdp_observed: dict[str, list[torch.Tensor]] = {}
        self._dcmdp_handles = [
            module.register_forward_hook(
                functools.partial(_observe, self._dcmdp_observed, name), with_kwargs=True
            )
            for name, module in self.model_runner.get_model().named_modules()
            if name in names
        ]
        return {name: torch.cat(values).numpy() for name, values in previous.items()}

    @functools.cached_property
    def _dcmdp_recorder(self) -> "RoutingRecorder":
        return RoutingRecorder(self.model_runner)

    def dcmdp_receive(
        self,
        source: Any,
        size: int,
        manifest: list[Any],
        policy_version: int,
        lora: Any,
    ) -> list[int]:
        """Load every tensor of a weight segment; return checksums of what was handed to the model.

        Args:
            source: /proc path of the segment, `size` bytes; or those bytes, an array, kept until
                the next call.
            manifest: as it crossed the wire.
            policy_version: version that the checksums depend on.
            lora: rank and alpha of adapters; None for a model, or their base.
        """
        tensors = segments.parse(manifest, size)
        memory = _attached(source, size) if isinstance(source, str) else source
        sums: dict[str, int] = {}
        # The order of the manifest is not that of consumption: layers are loaded as the iterator
        # yields them.
        weights = _handed_over(memory, tensors, policy_version, sums)
        if lora:
            manager = self.model_runner.lora_manager._adapter_manager
            _replace_adapters(manager, weights, policy_version + 1, PEFTHelper(*lora, []))
        else:
            self._dcmdp_load(memory, tensors, weights)
            missing = [tensor.name for tensor in tensors if tensor.name not in sums]
            if missing:
                raise RuntimeError(
                    f"the engine did not take {missing[0]} and {len(missing) - 1} more tensors"
                )
        return [sums[tensor.name] for tensor in tensors]

    def _dcmdp_load(
        self,
        memory: np.ndarray,
        tensors: list[segments.Tensor],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Load a model: by vLLM's reload at first, and later by what was recorded of it."""
        model = self.model_runner.get_model()
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            # vLLM 0.32 on CPU packs experts when it makes their kernel: an old kernel keeps the old
            # ones.
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    method.moe_kernel = None

        plan, start = self.__dict__.get("_dcmdp_plan", ([], 0))
        if plan:
            # Checksums, which are taken as the iterator goes.
            collections.deque(weights, maxlen=0)
            _move(plan, start, memory)
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                for layer, loads in plan:
                    _load_again(layer, loads)
        else:
            with _recorded() as plan:
                self.reload_weights(weights_iterator=weights)
            if not _covers(plan, memory, tensors):
                plan = []
        self._dcmdp_plan = plan, memory.ctypes.data

        if on_cpu:
            # vLLM 0.32 on CPU leaves an output layer tied to the embedding in its old packed form
            # when it reloads.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def dcmdp_scale_logits(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1 ends it.

        vLLM's prompt log-probs know no temperature. Division in float32 and log-softmax after it
        are what its sampler does with the logits of a sampled token.
        """
        model = self.model_runner.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature != 1.0:
            plain = model.compute_logits
            model.__dict__["compute_logits"] = lambda *a, **k: (
                plain(*a, **k).to(torch.float32).div_(temperature)
            )


def _replace_adapters(
    manager: Any,
    weights: Iterator[tuple[str, torch.Tensor]],
    name: int,
    shape: PEFTHelper,
) -> None:
    """Give vLLM the adapters of every layer, in place of those that it has.

    Args:
        manager: vLLM's, of a worker's layers.
        weights: A and B by their names in PEFT, views.
        name: vLLM's number of them.
        shape: rank and alpha.
    """
    # Copies: vLLM (0.32) multiplies B by alpha / r in place.
    copies = {tensor: value.clone() for tensor, value in weights}
    adapters = LoRAModel.from_lora_tensors(name, copies, shape, "cpu")
    manager.remove_all_adapters()
    manager.add_adapter(adapters)
    manager.activate_adapter(name)
    unused = sorted(adapters.loras.keys() - manager.modules.keys())
    if unused:
        raise RuntimeError(
            f"the engine did not take the adapter of {unused[0]} and {len(unused) - 1} more layers"
        )


def _observe(
    observed: dict[str, list[torch.Tensor]],
    name: str,
    _: Any,
    args: Any,
    kwargs: Any,
    output: Any,
) -> None:
    """A forward hook that copies input and output to `observed`: later kernels write in place.

    A norm that adds first gives the sum that it read, too.
    """
    output, *sums = output if isinstance(output, tuple) else (output,)
    sides = {"gave": output}
    for value in (*sums, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            sides["read"] = value
            break
    for side, value in sides.items():
        copy = value.detach().to("cpu", torch.float32, copy=True)
        observed.setdefault(f"{name} {side}", []).append(copy.flatten(0, -2))


# A layer, and of each tensor that it was given its parameter's name and the arguments of vLLM's
# loader.
_Load = tuple[torch.nn.Module, list[tuple[str, inspect.BoundArguments]]]


@contextlib.contextmanager
def _recorded() -> Iterator[list[_Load]]:
    """What vLLM's reload gives to each layer, in order.

    vLLM finds each tensor's layer, counts what the layer was given on a copy without memory, and
    processes the layer once all is there. A layer with nothing to load has no part in it, and
    attention without scales of its own neither.
    """
    process = layerwise._layerwise_process
    plan = []

    def note(layer: torch.nn.Module, info: Any) -> None:
        plan.append((layer, list(info.loaded_weights)))
        process(layer, info)
        _forget(plan[-1][1])

    layerwise._layerwise_process = note
    try:
        yield plan
    finally:
        layerwise._layerwise_process = process


def _forget(loads: list[tuple[str, inspect.BoundArguments]]) -> None:
    """Drop the parameters that were loaded into: each layer's are made again, and copied from."""
    for _, arguments in loads:
        arguments.arguments["param"] = None


def _loaded_tensors(plan: list[_Load]) -> Iterator[torch.Tensor]:
    """The tensors that a plan gives to its layers."""
    for _, loads in plan:
        for _, arguments in loads:
            for value in arguments.arguments.values():
                if isinstance(value, torch.Tensor):
                    yield value


def _move(plan: list[_Load], start: int, memory: np.ndarray) -> None:
    """Let the views of a copy of the weights that began at `start` be views of this one."""
    storage = torch.from_numpy(memory).untyped_storage()
    for value in _loaded_tensors(plan):
        offset = (value.data_ptr() - start) // value.itemsize
        value.set_(storage, offset, value.shape, value.stride())


def _covers(plan: list[_Load], memory: np.ndarray, tensors: list[segments.Tensor]) -> bool:
    """Whether what the layers were given are views of the segment, and together all of it.

    A model that computes something from a tensor before it is loaded, or keeps it for later, is
    loaded by vLLM's own reload each time.
    """
    starts = np.array([tensor.offset for tensor in tensors])
    missing_bytes = np.array([tensor.num_bytes for tensor in tensors])
    for value in _loaded_tensors(plan):
        offset = value.data_ptr() - memory.ctypes.data
        if not 0 <= offset < memory.size:
            return False
        missing_bytes[np.searchsorted(starts, offset, side="right") - 1] -= value.nbytes
    return bool((missing_bytes <= 0).all())


def _load_again(layer: torch.nn.Module, loads: list[tuple[str, inspect.BoundArguments]]) -> None:
    """Do for a layer what vLLM's reload does once it has all of the layer's tensors."""
    if getattr(layer, "quant_method", None) is None:
        # Its parameters are as they were loaded.
        for name, arguments in loads:
            arguments.arguments["param"] = param = getattr(layer, name)
            layerwise._get_original_loader(param)(*arguments.args, **arguments.kwargs)
    else:
        info = layerwise.get_layerwise_info(layer)
        info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        layerwise.restore_layer_on_meta(layer, info)
        info.loaded_weights = list(loads)
        layerwise._layerwise_process(layer, info)
    _forget(loads)


@functools.cache
def _attached(path: str, size: int) -> np.ndarray:
    """One mapping for all weight syncs: mapping each page again costs as much as reading it."""
    return segments.attach(path, size)


def _handed_over(
    memory: np.ndarray,
    tensors: list[segments.Tensor],
    policy_version: int,
    sums: dict[str, int],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and view of each tensor of a segment; its checksum goes to `sums` as it is taken."""
    for tensor in tensors:
        data = memory[tensor.byte_range]
        sums[tensor.name] = segments.checksum(data, policy_version)
        value = torch.from_numpy(data).view(getattr(torch, tensor.dtype))
        yield tensor.name, value.view(tensor.shape)


class Routing:
    """The sidecar's side: asks vLLM, or the recorders of workers, for experts of completions."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Read `enable_return_routed_experts` of vLLM's arguments; the CPU build takes it out."""
        self._enabled = arguments.get("enable_return_routed_experts", False)
        self._recorded = self._enabled and current_platform.is_cpu()
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
        """ "routed_experts" [tokens, layers, k] int16 of ended completions, one after the other.

        Of each its prompt's tokens and its own but the last. Nothing without completions, or if
        nobody asked.
        """
        if not self._enabled or not outputs:
            return {}
        if self._recorded:
            requests = [output.request_id for output in outputs]
            # All workers route alike.
            routed = llm.collective_rpc("dcmdp_take_routing", args=(requests,))[0]
        else:
            routed = [output.outputs[0].routed_experts for output in outputs]
        return {"routed_experts": np.concatenate(routed).astype(np.int16)}


class RoutingRecorder:
    """Follows a model runner's forward passes and records what its routers choose.

    vLLM's own switch (`enable_return_routed_experts`, 0.32) needs a model runner that its CPU build
    does not have. The prefix cache must be off: cached tokens are not computed.
    """

    def __init__(self, model_runner: Any) -> None:
        """Listen to the routers of all layers and to each forward pass.

        Args:
            model_runner: runner of a vLLM worker, with a mixture of experts.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner = model_runner
        self._on = False
        self._layers: dict[int, torch.Tensor] = {}
        # Request -> (position of the first token, [tokens, layers, k]) of each forward pass.
        self._passes: dict[str, list[tuple[int, np.ndarray]]] = {}
        for module in model_runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(functools.partial(self._note, module.layer_id))
        self._execute = model_runner.execute_model
        model_runner.execute_model = self._execute_model

    def restart(self, on: bool) -> None:
        """Forget everything, and record from now on or not."""
        self._on = on
        self._layers = {}
        self._passes = {}

    def take(self, requests: list[str]) -> list[np.ndarray]:
        """Return what was recorded of finished requests, and forget it.

        Args:
            requests: identifiers as the caller gave them; vLLM appends a suffix of its own to each.

        Returns:
            [tokens, layers, k] int16 for each, all its tokens but the last, which is not read.
        """
        full_names = {name.partition("-")[0]: name for name in self._passes}
        return [_joined(self._passes.pop(full_names[request])) for request in requests]

    def _note(self, layer: int, experts: torch.Tensor) -> None:
        if self._on:
            self._layers[layer] = experts.to(torch.int16)

    def _execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        # Read before the pass, which moves them on.
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in scheduled.scheduled_new_reqs:
            starts[request.req_id] = request.num_computed_tokens
        output = self._execute(scheduled, *args, **options)
        if self._on and scheduled.total_num_scheduled_tokens:
            self._record_pass(scheduled, starts)
        return output

    def _record_pass(self, scheduled: Any, starts: dict[str, int]) -> None:
        """Give each request of a forward pass the experts of its tokens, in the batch's order."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        experts = torch.stack(layers, dim=1).numpy()
        begin = 0
        for request in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                passes = self._passes.setdefault(request, [])
                passes.append((starts[request], experts[begin : begin + count]))
                begin += count
        if begin != scheduled.total_num_scheduled_tokens:
            raise RuntimeError(
                f"experts of {begin} tokens, {scheduled.total_num_scheduled_tokens} were computed"
            )


def _joined(passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Join all passes in one array; tokens keep what they were sampled with.

    A preempted request is computed again, and the earlier pass stays.
    """
    size = max(start + len(experts) for start, experts in passes)
    joined = np.full((size, *passes[0][1].shape[1:]), -1, np.int16)
    for start, experts in reversed(passes):
        joined[start : start + len(experts)] = experts
    return joined
