"""The manifest of the weight bridge against the model. Runs under the sidecar's interpreter."""

from __future__ import annotations

from dcmdp_jax.engines.sidecar import manifest


def check_received_tensors(directory: str, tensors: list[manifest.Tensor]) -> None:
    """Compare the manifest with the model that transformers builds from the same config.json, on no device.

    A tensor that is missing, or a part of a fused one, is silently wrong in vLLM.

    Args:
        directory: holds config.json.
        tensors: the manifest.

    Raises:
        ValueError: naming the first tensor that differs.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        expected |= _separate_experts(name, tuple(value.shape))
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    given = {t.name: t.shape for t in tensors if not t.name.endswith("_scale")}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"manifest: {name} has shape {given.get(name, 'missing')}, the model of {directory}/config.json has "
                f"{expected.get(name, 'no such')}"
            )


def _separate_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A tensor by name, or the tensors of checkpoints for one that transformers 5 keeps fused, experts first."""
    module, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        count, rows, columns = shape
        return {
            f"{module}.experts.{expert}.{half}_proj.weight": (rows // 2, columns)
            for expert in range(count)
            for half in ("gate", "up")
        }
    if part == "down_proj":
        return {f"{module}.experts.{expert}.down_proj.weight": shape[1:] for expert in range(shape[0])}
    return {name: shape}
