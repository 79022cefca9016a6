"""The demo with a remedy for engine mismatch other than DC-GRPO's multiplier, or beside it.

    dcmdp train --config=configs/remedies.py:grpo,tis      # GRPO with TIS
    dcmdp train --config=configs/remedies.py:tis           # DC-GRPO with TIS
    dcmdp train --config=configs/remedies.py:grpo,dppo
    dcmdp train --config=configs/remedies.py:grpo,tis,veto # two corrections
    dcmdp train --config=configs/remedies.py:grpo,tis,debug  # a minute

Task, model, engine and steps are those of configs/demo.py. Thresholds are those of the papers and
peers that docs/remedies.md names, and ours for geometric_rejection, k1, k2, k3 and dppo_kl; none is
tuned for this model. A remedy that is a correction joins others; of two that set the same setting
the last counts.
"""

from ml_collections import ConfigDict

from configs import base, demo

_ROLLOUT = {"ratio_denominator": "rollout"}

REMEDIES = {
    "tis": {"corrections": "tis(high=2)"},
    "sequence_tis": {"corrections": "sequence_tis(high=2)"},
    "icepop": {"corrections": "icepop(low=0.5,high=5)"},
    "sequence_mis": {"corrections": "sequence_mis(high=3)"},
    "sequence_rejection": {"corrections": "sequence_rejection(low=0.5,high=2)"},
    "geometric_rejection": {"corrections": "geometric_rejection(low=0.99,high=1.01)"},
    "k1": {"corrections": "kl_rejection(estimator=k1,over=token,high=0.7)"},
    "k2": {"corrections": "kl_rejection(estimator=k2,over=mean,high=0.01)"},
    "k3": {"corrections": "kl_rejection(estimator=k3,over=mean,high=0.01)"},
    "veto": {"corrections": "veto(floor=1e-4)"},
    "off_policy_mask": {"corrections": "off_policy_mask(high=0.5)"},
    "cis": {"corrections": "cis"},
    "kpop": {"corrections": "kpop(high=2)"},
    "vaco": {"corrections": "vaco(high=0.05)"},
    "m2po": {"corrections": "m2po(high=0.04)"},
    "sequence_error": {"corrections": "sequence_error(high=1.5)"},
    "probability_band": {"corrections": "probability_band(low=0.2,high=0.2)"},
    "minpro": {"corrections": "minpro"},
    "ctpo": {"corrections": "ctpo"},
    "pnpo": {"corrections": "pnpo"},
    "bypass": {"ratio_denominator": "bypass"},
    "dppo": _ROLLOUT | {"trust_region": "dppo_tv(low=0.2,high=0.2)"},
    "dppo_kl": _ROLLOUT | {"trust_region": "dppo_kl(low=0.05,high=0.05)"},
    "drpo": _ROLLOUT | {"trust_region": "drpo(low=0.2,high=0.2)"},
    "ipo": _ROLLOUT | {"trust_region": "ipo(high=0.3,cap=1e4)"},
    "cispo": _ROLLOUT | {"trust_region": "cispo(high=5)"},
    "sapo": _ROLLOUT | {"trust_region": "sapo"},
    "vespo": _ROLLOUT | {"trust_region": "vespo"},
    "acr": {"trust_region": "acr(cap=2)", "corrections": "tis(high=2)"},
    "log_ratio_squared": {"loss": "log_ratio_squared(tau=1e-3)"},
    "gspo": {"ratio_level": "sequence", "trust_region": "clip(low=3e-4,high=4e-4)"},
    "dual_clip": {"trust_region": "clip(dual=3)"},
    "dapo": {
        "aggregation": "token_mean",
        "trust_region": "clip(high=0.28)",
        "overlong_buffer": 8,
        "drop_equal_groups": True,
        "refill_rounds": 9,
    },
}


def get_config(arg: str = "") -> ConfigDict:
    config = demo.get_config()
    config.run_dir = "runs/remedies"
    options = [option for option in arg.split(",") if option]
    for remedy in [option for option in options if option in REMEDIES]:
        config.run_dir += f"_{remedy}"
        for name, value in REMEDIES[remedy].items():
            before = config.algorithm.corrections
            config.algorithm[name] = (
                f"{before},{value}" if name == "corrections" and before else value
            )
    return base.with_options(config, arg, REMEDIES)
