"""Every cause, planted in real (tiny, embedded) engines and named; a clean pair called clean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.engines.local import cache, decode
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import Lora
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import adapter_declarations, merged
from dcmdp_jax.models.params import draw_params
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.probe.columns.analysis import analyze
from dcmdp_jax.probe.columns.evidence import outliers
from dcmdp_jax.probe.live.compare import Setup, compare, explained, sampling_floor
from dcmdp_jax.probe.live.engines import Sampled, TrainingStack, cache_rounding, parse_spec, sample
from dcmdp_jax.probe.live.session import lift
from tests.support.sampling import local_engine
from tests.support.tiny_model import CONFIG, TOKENIZER, params

QUESTIONS = [f"{a}+{b}=?" for a in (12, 47) for b in (5, 38)]
SAMPLING = SamplingParams(group_size=8, max_completion_tokens=32)
LONGEST = 96


def _tokens(text):
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


PROMPTS = [
    _tokens(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    for question in QUESTIONS
]
BARE = [_tokens(question) for question in QUESTIONS]


def with_one_stale_tensor():
    mixed = jax.tree.map(lambda leaf: leaf, params())
    kernel = mixed["layers"]["mlp"]["down"]["kernel"]
    mixed["layers"]["mlp"]["down"]["kernel"] = kernel.at[1].set(
        params(True)["layers"]["mlp"]["down"]["kernel"][1]
    )
    return mixed


def local(weights=None, **settings):
    engine = local_engine(CONFIG, max_total_tokens=LONGEST, max_rows=64, **settings)
    engine.sync_weights(params() if weights is None else weights, 0)
    return engine


def sampled(engine, prompts=None, **distribution):
    return sample(engine, prompts or PROMPTS, dataclasses.replace(SAMPLING, **distribution), seed=0)


def analysis(
    engine,
    found,
    *,
    temperature=1.0,
    compute="float32",
    rescore=True,
    train_compute="float32",
    weights=None,
    **more,
):
    weights = weights or params()
    setup = Setup(
        config=CONFIG,
        params=weights,
        prompts=PROMPTS,
        temperature=temperature,
        earlier={"step 3": params(True)},
        prompt_variants={"text without a chat template": BARE},
        text=TOKENIZER.decode,
        compute=compute,
        **more,
    )
    trainer = TrainingStack(CONFIG, weights, compute=Compute(dtype=train_compute))
    measured = compare("pair", {}, found, {"engine": engine, "trainer": trainer}, setup)
    return analyze(explained(measured, found.prompt_index, setup) if rescore else measured)


def named(*arguments, **options):
    return analysis(*arguments, **options).findings


def test_a_clean_pair_is_called_clean():
    engine = local()
    found = analysis(engine, sampled(engine))
    assert [finding.cause for finding in found.findings] == ["clean"]
    # Two float32 programs of one model: rounding, and not a bit-for-bit copy that would hide
    # everything.
    assert 0 < found.statistics.mean < 1e-6 and all(
        0 <= floor < 1e-6 for floor in found.floors.values()
    )


def test_the_sampling_floor_is_that_of_another_batch():
    engine = local(precision="bfloat16", compute_dtype="bfloat16")
    found = sampled(engine)
    floor = sampling_floor(engine, found.episodes, SAMPLING, seed=0)
    # bfloat16 rounds logits near 4 by 2^-6 at most; float32 would leave 1e-7, another seed nothing
    # to compare.
    assert floor is not None and floor < 0.02
    assert sampling_floor(engine, found.episodes[:1], SAMPLING, seed=0) is None
    moved = [
        episode.with_columns(rollout_logprobs=episode.rollout_logprobs - 1)
        for episode in found.episodes
    ]
    assert sampling_floor(engine, moved, SAMPLING, seed=0) > 10 * floor


def test_bfloat16_is_rounding_noise():
    engine = local(precision="bfloat16", compute_dtype="bfloat16")
    found = analysis(engine, sampled(engine), compute="bfloat16")
    assert (
        found.findings[0].cause == "rounding"
        and found.recommendation.tolerance > found.statistics.mean > 1e-3
    )


def test_adapters_that_the_engines_weights_round_are_named():
    lora = Lora(4, 8.0)
    base = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params())
    drawn = draw_params(adapter_declarations(CONFIG, lora), jax.random.key(0), "float32")
    adapters = jax.tree.map(lambda leaf: leaf + 0.01, drawn)  # B is 0 no more
    whole = merged(base, adapters, lora)
    engine = local(whole, precision="bfloat16", compute_dtype="float32")
    rounded = merged(base, adapters, lora, "bfloat16")
    finding = named(engine, sampled(engine), weights=whole, as_rounded=rounded)[0]
    assert finding.cause == "merge" and "explains 100% of the mismatch" in finding.evidence[0]


@pytest.mark.parametrize(
    ("settings", "sampling", "cause", "said"),
    [
        ({"precision": "int8"}, {}, "quantized_weights", "Scoring with int8 weights"),
        ({"precision": "int4"}, {}, "quantized_weights", "Scoring with int4 weights"),
        (
            {"precision": "fp8"},
            {},
            "quantized_weights",
            "Scoring with fp8 weights, a scale for each output channel",
        ),
        ({"kv_cache_dtype": "fp8"}, {}, "quantized_cache", "Scoring with an fp8 key-value cache"),
        (
            {"precision": "bfloat16", "compute_dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            {},
            "quantized_cache",
            "Scoring with an fp8",
        ),
        ({}, {"temperature": 0.7}, "temperature", "temperature 0.70 in place of 1.00"),
        ({}, {"temperature": 1.4}, "temperature", "temperature 1.40 in place of 1.00"),
        ({}, {"top_p": 0.6}, "support", "Mean p / q"),
        ({}, {"top_p": 0.95}, "support", "Mean p / q"),
    ],
)
def test_what_the_engine_or_its_sampling_has_changed_is_named(settings, sampling, cause, said):
    engine = local(**settings)
    finding = named(
        engine, sampled(engine, **sampling), compute=settings.get("compute_dtype", "float32")
    )[0]
    assert finding.cause == cause and said in finding.evidence[0]


def test_a_cache_is_rounded_again_as_the_engine_rounds_it():
    """vLLM's CPU build truncates, ours rounds to nearest: scored again the other way, much of it is
    left.
    """
    engine = local()
    form = {
        each: cache_rounding(parse_spec(each)) for each in ("local:exact,cache=fp8", "local:int8")
    }
    assert set(form.values()) == {"fp8"}
    form = {
        each: cache_rounding(parse_spec(f"vllm:bfloat16,cache={each}"))
        for each in ("auto", "fp8", "fp8_e5m2")
    }
    assert form == {
        "auto": "fp8_truncated",
        "fp8": "fp8_truncated",
        "fp8_e5m2": "fp8_e5m2_truncated",
    }
    found = sampled(engine)
    truncating = TrainingStack(
        CONFIG, params(), compute=Compute(), scheme=Scheme(cache=form["fp8"])
    )
    prompts = [PROMPTS[index] for index in found.prompt_index]
    found = dataclasses.replace(
        found, logprobs=truncating.score(prompts, found.completion_ids, temperature=1.0)
    )
    share = {
        cache: next(
            each.share
            for each in analysis(engine, found, cache=cache).evidence.explanations
            if "cache" in each.name
        )
        for cache in (form["fp8"], "fp8")
    }
    assert share["fp8_truncated"] > 0.99 > 0.9 > share["fp8"]


@pytest.mark.parametrize("precision", ["nvfp4", "nvfp4_w4a4"])
def test_weights_in_groups_are_named_by_their_own_format(precision):
    pytest.importorskip("qwix", reason="the extra qwix is not installed")
    engine = local(precision=precision)
    finding = named(engine, sampled(engine), precision=precision)[0]
    assert finding.cause == "quantized_weights"
    said = finding.evidence[0]
    assert f"Scoring with {precision} weights, a scale for each group explains" in said
    # The activations that nvfp4_w4a4 rounds are in it.
    assert int(said.split("explains ")[1].split("%")[0]) >= 99


@pytest.mark.parametrize(
    ("engine", "cause", "said"),
    [
        (
            "local:exact,cache=fp8",
            "quantized_cache",
            "The engine's key-value cache is fp8. Without it, as local:exact,",
        ),
        (
            "local:int8",
            "quantized_weights",
            "The engine's weights are int8. Without it, as local:float32,",
        ),
    ],
)
def test_what_no_emulation_reproduces_is_measured_by_the_engine_without_it(
    engine, cause, said, monkeypatch
):
    monkeypatch.setattr("dcmdp_jax.probe.live.compare._EMULATED", ())
    spec = parse_spec(engine)

    def build(spec):
        return local(
            precision=spec.precision, compute_dtype=spec.compute, kv_cache_dtype=spec.cache
        )

    first = build(spec)
    found = sampled(first)
    setup = Setup(
        config=CONFIG, params=params(), prompts=PROMPTS, temperature=1.0, settings=spec.costs
    )
    pair = {"engine": first, "trainer": TrainingStack(CONFIG, params(), compute=Compute())}
    measured = explained(compare("pair", {}, found, pair, setup), found.prompt_index, setup)
    lifted = lift(spec, build, PROMPTS, found, measured.pairs, temperature=1.0)
    finding = analyze(dataclasses.replace(measured, lifted=lifted)).findings[0]
    assert finding.cause == cause and finding.evidence[0].startswith(said)
    assert finding.evidence[0].endswith("100% of the mismatch is gone.")
    # Without that measurement the settings are all there is.
    assert (
        analyze(measured).findings[0].evidence[0].startswith("By its settings, not by measurement")
    )
    # A setting that changes nothing is not blamed.
    innocent = [dataclasses.replace(setting, share=0.02) for setting in lifted]
    assert (
        analyze(dataclasses.replace(measured, lifted=innocent)).findings[0].cause == "undetermined"
    )


def test_raw_log_probs_in_place_of_those_sampled_from():
    engine = local()
    found = sampled(engine, temperature=0.7)
    prompts = [PROMPTS[index] for index in found.prompt_index]
    raw = dataclasses.replace(
        found, logprobs=engine.score(prompts, found.completion_ids, temperature=1.0)
    )
    finding = named(engine, raw, temperature=0.7)[0]
    assert (
        finding.cause == "raw_logprobs"
        and "temperature 1.00 in place of 0.70" in finding.evidence[0]
    )
    # The columns alone show it too.
    assert named(engine, raw, temperature=0.7, rescore=False)[0].cause == "raw_logprobs"


def test_stale_weights():
    engine = local(params(True))
    finding = named(engine, sampled(engine))[0]
    assert (
        finding.cause == "stale_weights"
        and finding.evidence[0]
        == "Scoring with the weights of step 3 explains 100% of the mismatch."
    )


def test_one_tensor_that_was_not_synchronized_is_named():
    engine = local(with_one_stale_tensor())
    finding = named(engine, sampled(engine))[0]
    assert finding.cause == "unsynchronized_tensor"
    assert finding.evidence[0].startswith(
        "Scoring with model.layers.1.mlp.down_proj.weight of step 3"
    )


def test_an_engine_with_another_chat_template():
    engine = local()
    found = sampled(engine, BARE)
    finding = named(engine, found)[0]
    assert (
        finding.cause == "chat_template"
        and "text without a chat template explains 100%" in finding.evidence[0]
    )


def test_completions_that_were_decoded_and_encoded_again():
    engine = local()
    found = sampled(engine)
    completions = []
    logprobs = []
    for place, (ids, values) in enumerate(zip(found.completion_ids, found.logprobs, strict=True)):
        if place % 4 == 0:
            # Two tokens become one at the middle, as a merge does; the pipeline lines the rest up
            # as it comes.
            ids = np.concatenate([ids[: len(ids) // 2], ids[len(ids) // 2 + 1 :]])
        completions.append(ids)
        logprobs.append(values[: len(ids)])
    broken = Sampled(prompt_index=found.prompt_index, completion_ids=completions, logprobs=logprobs)
    finding = named(engine, broken)[0]
    assert finding.cause == "retokenization" and "25.0% of the completions" in finding.evidence[0]


def test_rounding_of_the_trainer_is_not_blamed_on_weights():
    engine = local()
    found = analysis(engine, sampled(engine), train_compute="bfloat16", compute="bfloat16")
    assert found.findings[0].cause == "rounding"


@pytest.fixture
def faulty_reads(monkeypatch):
    """Decoding programs that read keys and values a tenth too large; those of other tests are not
    touched.
    """
    jax.clear_caches()
    monkeypatch.setattr(decode, "load", lambda stored, dtype: 1.1 * cache.load(stored, dtype))
    yield
    jax.clear_caches()


def test_legs_add_up_and_a_fault_of_decoding_lies_in_the_first(faulty_reads):
    engine = local()
    found = analysis(engine, sampled(engine))
    decoding, one_pass = found.evidence.legs
    assert decoding.share + one_pass.share == pytest.approx(1, abs=1e-9)
    assert decoding.log_ratio + one_pass.log_ratio == pytest.approx(found.statistics.k1, abs=1e-6)
    assert decoding.share > 0.999 and one_pass.mean < 1e-6 < 1e-3 < decoding.mean
    assert found.findings[0].cause == "decoding"
    # Nothing is wrong with an operator on whole rows.
    assert max(each.relative for each in found.evidence.operators) < 1e-5


def rounded_head(engine):
    engine.weights["embedding"] = engine.weights["output"].T  # the head alone
    engine.weights["output"] = engine.weights["output"].astype(jnp.bfloat16).astype(jnp.float32)


def other_matrix(engine):
    down = engine.weights["layers"][1]["mlp"]["down"]
    down["kernel"] = params(True)["layers"]["mlp"]["down"]["kernel"][1]


@pytest.mark.parametrize(
    ("plant", "cause", "place"),
    [(rounded_head, "head", "head"), (other_matrix, "mlp", "mlp of layer 1")],
)
def test_an_operator_that_differs_is_named_with_its_layer(plant, cause, place):
    engine = local()
    plant(engine)
    setup = Setup(config=CONFIG, params=params(), prompts=PROMPTS, temperature=1.0)
    pair = {"engine": engine, "trainer": TrainingStack(CONFIG, params(), compute=Compute())}
    found = analyze(compare("pair", {}, sampled(engine), pair, setup))
    assert (
        found.findings[0].cause == cause
        and f"the {place} gives another output" in found.findings[0].evidence[0]
    )
    decoding, one_pass = found.evidence.legs
    assert one_pass.share > 0.99 and decoding.mean < 1e-5
    assert [str(each) for each in outliers(found.evidence.operators)] == [place]


def test_a_quantized_cache_stands_out_in_every_layer():
    engine = local(kv_cache_dtype="fp8")
    found = analysis(engine, sampled(engine), rescore=False).evidence.operators
    assert [(each.operator, each.layer) for each in outliers(found)] == [
        ("cache", n) for n in range(CONFIG.num_layers)
    ]
