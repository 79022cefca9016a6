"""The trainer's weights in shared memory: one copy for all replicas of an engine, and one that is being written."""

from __future__ import annotations

import dataclasses

import numpy as np

from dcmdp_jax.engines.sidecar.bridge import WeightBridge
from dcmdp_jax.engines.sidecar.probe import Probe, probe_ids
from dcmdp_jax.engines.sidecar.shared_memory import Segment, available_bytes
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import check_params
from dcmdp_jax.types import Array, Params


@dataclasses.dataclass(frozen=True)
class Publication:
    """Weights that lie in a segment.

    Attributes:
        serial: counts publications; its parity says which of the two.
        policy_version: the trainer's step.
        checksums: of what was sent, [tensors] uint64.
        probe: the trainer's own log-probs of the probe sequences, or None without a probe.
    """

    serial: int
    policy_version: int
    checksums: np.ndarray
    probe: Array | None


class SharedWeights:
    """Two segments, written in turn, and what was published last."""

    def __init__(
        self, config: ModelConfig, *, compute_dtype: str, int8: bool, probe: Probe | None, max_total_tokens: int
    ) -> None:
        """Allocate the segments.

        Args:
            config: the model.
            compute_dtype, int8: of the tensors (`WeightBridge`).
            probe: the trainer's own log-probs of fixed sequences; None: no probe.
            max_total_tokens: longest row of the engine.

        Raises:
            MemoryError: if shared memory for two copies can't be allocated; it says how much is free.
        """
        self.config = config
        self.bridge = WeightBridge(config, dtype=compute_dtype, int8=int8)
        self.num_bytes: int = self.bridge.num_bytes
        """Size of a segment."""
        if 2 * self.num_bytes > (available := available_bytes()):
            raise MemoryError(
                f"vLLM sidecar: two copies of the weights in shared memory need {2 * self.num_bytes / 2**30:.2f} GiB, "
                f"{available / 2**30:.2f} GiB are free; free some, or choose a smaller model or `compute_dtype`"
            )
        self.left_bytes: int = available - 2 * self.num_bytes
        """Free memory when both are allocated."""
        self.probe = probe
        self.probe_ids = probe_ids(config.vocab_size, max_total_tokens)
        self.published: Publication | None = None
        """The newest, or None before the first."""
        self._serial = 0
        first = Segment("dcmdp-weights-0", self.num_bytes)
        try:
            self.segments: tuple[Segment, ...] = (first, Segment("dcmdp-weights-1", self.num_bytes))
        except BaseException:
            first.close()
            raise

    def publish(self, params: Params, policy_version: int) -> Publication:
        """Write the parameters into the segment that is not in use.

        Raises:
            ValueError: for parameters that are not those of the model.
        """
        check_params(params, self.config)
        serial, policy_version = self._serial + 1, int(policy_version)
        checksums = self.bridge.publish(params, self.segments[serial % 2], policy_version)
        probe = None if self.probe is None else self.probe(params, self.probe_ids)
        self._serial = serial
        self.published = Publication(serial, policy_version, checksums, probe)
        return self.published

    def close(self) -> None:
        """Free the shared memory. Safe to call twice."""
        self.published = None
        for segment in self.segments:
            segment.close()
