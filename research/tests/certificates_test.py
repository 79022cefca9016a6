"""A certificate's numbers by hand; the kept ones meet what they are shown for, and the page is
theirs.
"""

import dataclasses
import json

import numpy as np
import pytest

import dcmdp_jax
from dcmdp_jax.probe.columns.pairs import make_pairs, measure
from research import certificates

KEPT = [json.loads(path.read_text()) for path in sorted(certificates.KEPT.glob("*.json"))]


def test_a_certificate_has_the_numbers_of_each_engine():
    p, q = ([np.log(np.array(x, np.float32))] for x in ([0.5, 0.8], [0.4, 0.9]))
    pairs = make_pairs([np.array([1, 2])], p, q)
    source = {"model": "m", "family": "qwen3", "sampled by": "local:int8"}
    probe = {"pairs": [{"source": source, "statistics": dataclasses.asdict(measure(pairs))}]}
    record = certificates.certificate(probe, ["--model=a b"])
    (row,) = record["engines"]
    # logit 0.5 - logit 0.4 = ln 1.5; logit 0.8 - logit 0.9 = ln 4 - ln 9: mean of sizes (0.405 +
    # 0.811) / 2.
    assert row["displacement_abs_mean"] == pytest.approx(
        (np.log(1.5) + np.log(9 / 4)) / 2, rel=1e-2
    )
    # r = 1.25 and 0.889: r - 1 - ln r is 0.0269 and 0.0067. k1 would be -0.053.
    assert row["mean"] == pytest.approx(0.1, rel=1e-2) and row["k3"] == pytest.approx(
        0.0168, rel=1e-2
    )
    assert record["command"] == "dcmdp probe '--model=a b'" and record["versions"]["jax"]
    # Also where the package is run from a checkout that is not installed.
    assert record["versions"]["dcmdp_jax"] == dcmdp_jax.__version__
    assert (row["engine"], record["model"], record["family"]) == ("local:int8", "m", "qwen3")


@pytest.mark.parametrize("record", KEPT, ids=lambda record: record["model"])
def test_a_kept_certificate_says_that_a_family_is_computed_alike(record):
    if "transformers" in record:
        assert (
            record["log_probs"] <= certificates.LOG_PROBS
            and record["tokens"] >= certificates.TOKENS
        )
        assert record["greedy"] == record["greedy_of"] > 0
        assert record["tokenizer"] or record["weights"] == "random"
    rows = {row["engine"]: row for row in record["engines"]}
    for name in {"local:float32", "vllm:float32"} & set(rows):
        assert rows[name]["mean"] < 1e-4 and rows[name]["k3"] < certificates.BAR


def test_the_page_is_made_from_the_kept_files():
    assert certificates.PAGE.read_text() == certificates.page()
