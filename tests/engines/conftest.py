"""Real vLLM sidecars for the tests of this directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import engine as vllm_engine
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import Lora, ModelConfig
from tests.support.vllm_tools import (
    ROWS,
    TOTAL,
    left_behind,
    memory_files,
    sidecars,
    trainer_probe,
    vllm_settings,
)
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def nothing_left() -> Iterator[None]:
    """After a module's tests there are no more processes or temporary files than before.

    Nor segments or sockets, killed or not.
    """
    processes = sidecars()
    files = left_behind()
    descriptors = memory_files()
    yield
    # Tests of other modules run beside these; what is theirs goes with them.
    wait_until(
        lambda: not (sidecars() - processes or left_behind() - files),
        "sidecars, or files of theirs, to go",
    )
    assert memory_files() - descriptors == set()


@pytest.fixture(scope="module")
def start(
    vllm_is_installed: None, nothing_left: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., VllmEngine]]:
    """Start engines: start(config, precision="float32", ...) -> a running engine.

    All are closed at the end of the module.
    """
    engines: list[VllmEngine] = []

    def build(
        config: ModelConfig,
        *,
        precision: str = "float32",
        compute_dtype: str | None = None,
        kv_cache_dtype: str = "auto",
        max_rows: int = ROWS,
        probe: bool = True,
        script: Path | None = None,
        directory: Path | None = None,
        routed_experts: bool = False,
        top_logprobs: int = 0,
        prepare: bool = False,
        lora: Lora | None = None,
        **changes: object,
    ) -> VllmEngine:
        whole = precision in ("float32", "float16", "bfloat16")
        arguments = EngineArguments(
            precision=precision,
            compute_dtype=compute_dtype or (precision if whole else "bfloat16"),
            kv_cache_dtype=kv_cache_dtype,
            max_total_tokens=TOTAL,
            max_rows=max_rows,
            settings=vllm_settings(**changes),
            routed_experts=routed_experts,
            top_logprobs=top_logprobs,
            prepare=prepare,
            lora=lora,
            directory=directory or tmp_path_factory.mktemp("sidecar"),
            model=config,
            probe=(lambda: trainer_probe(config)) if probe else None,
        )
        with mock.patch.object(vllm_engine, "SCRIPT", script or vllm_engine.SCRIPT):
            engine = VllmEngine(arguments)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
