"""The kinds of mismatch: title, remedy, and the framework's own setting where it is known."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cause:
    """A kind of mismatch.

    Attributes:
        title: one noun phrase.
        remedy: advice, one line.
        defect: to be repaired. The others are the price of a fast engine, which a tolerance c can
            bound.
    """

    title: str
    remedy: str
    defect: bool = True


CAUSES = {
    "clean": Cause("no mismatch above the noise floor", "Nothing to do.", defect=False),
    "above_floor": Cause(
        "a mismatch far above the noise floor, and no larger than float32 rounding",
        "Probe the two engines with the model and --earlier weights: a re-scoring that explains it "
        "names a cause; if none does, sums in another order remain.",
        defect=False,
    ),
    "rounding": Cause(
        "rounding noise of the compute dtype",
        "Bound it by c, or compute both sides in float32 or with the same kernels; where they are, "
        "the engine holds its weights or its cache in fewer bits.",
        defect=False,
    ),
    "quantized_weights": Cause(
        "quantized weights of the engine",
        "Bound it by c, correct it by importance weights, or train through the same quantization.",
        defect=False,
    ),
    "quantized_cache": Cause(
        "quantized key-value cache of the engine",
        "Bound it by c, calibrate the cache's scales, or keep the cache in the compute dtype.",
        defect=False,
    ),
    "merge": Cause(
        "rounding of adapters where they are merged into the weights",
        "Bound it by c, or hold the engine's weights in more bits; it falls as the adapters' "
        "change grows.",
        defect=False,
    ),
    "temperature": Cause(
        "sampling temperature not accounted for",
        "Divide the training stack's logits by the temperature that the tokens are sampled at.",
    ),
    "support": Cause(
        "truncated support (top-p, top-k, min-p) not accounted for",
        "Sample with top_p=1 and no top_k, or mask the training stack's logits to the engine's "
        "support.",
    ),
    "raw_logprobs": Cause(
        "raw log-probs reported in place of those sampled from",
        "Have the engine report processed log-probs (vLLM: logprobs_mode=processed_logprobs).",
    ),
    "penalty": Cause(
        "repetition, presence or frequency penalty not accounted for",
        "Sample without it (repetition_penalty=1, presence_penalty=0, frequency_penalty=0).",
    ),
    "filled": Cause(
        "log-probs that were filled in (padding), not measured",
        "Leave these tokens out by the mask, or record their log-probs; a null is left out too.",
    ),
    "misaligned": Cause(
        "columns that are not aligned token by token",
        "A log-prob stands at the token that it describes, in the row of its completion: look at "
        "the recorder.",
    ),
    "unrelated": Cause(
        "columns that are not of the same tokens",
        "Compare the recorder's rows with the engine's: order of completions and tokens, mask, "
        "length of the prompt.",
    ),
    "random_weights": Cause(
        "random weights of the engine, or columns that are not of the same tokens",
        "Check that the engine loaded the checkpoint and got the weight sync; then compare the "
        "recorder's rows with its own.",
    ),
    "unsampled": Cause(
        "engine log-probs that did not sample the tokens",
        "Record what the engine reported while sampling (vLLM: logprobs_mode=processed_logprobs), "
        "in its order.",
    ),
    "stale_weights": Cause(
        "stale weights in the engine",
        "Sync the weights before each step and verify the weight sync by checksums; intended "
        "off-policy steps need an importance weight.",
    ),
    "unseen_updates": Cause(
        "updates that do not reach the engine",
        "Compare the engine's weights from one weight sync to the next: none arrives, or its "
        "dtype rounds the updates away.",
    ),
    "identical": Cause(
        "identical completions: samples that are not independent",
        "Seed each completion of a group differently; with equal log-probs too, rows may be "
        "recorded twice.",
    ),
    "unsynchronized_tensor": Cause(
        "a tensor that was not synchronized",
        "Look at that tensor's name, fusion and shape in the weight transfer; then compare "
        "checksums.",
    ),
    "retokenization": Cause(
        "completions re-tokenized between the engines",
        "Pass the sampled token ids on. Never decode a completion and encode it again.",
    ),
    "chat_template": Cause(
        "different prompts: chat template or special tokens",
        "Render each prompt once and pass its token ids to both engines.",
    ),
    "sharper": Cause(
        "tokens from a sharper distribution than the training stack's",
        "Compare temperature, top-p and top-k of both sides; then probe with the model: weights "
        "can be sharper too.",
    ),
    "decoding": Cause(
        "the engine while it decodes",
        "It differs from its own scores of the same tokens: look at cache writes, positions, "
        "decoding kernels.",
    ),
    "recurrent": Cause(
        "recurrent state while decoding",
        "Bound it by c: an engine sums token by token, a trainer in chunks. In float32 keep its "
        "state so too.",
        defect=False,
    ),
    **{
        operator: Cause(
            f"the engine's {title}",
            "Compare its weights, dtype and kernel with the training stack's.",
        )
        for operator, title in {
            "embedding": "embedding",
            "norm": "norms",
            "attention": "attention",
            "mlp": "MLP",
            "cache": "key-value cache",
            "head": "output head",
        }.items()
    },
    "undetermined": Cause(
        "other weights or another precision",
        "Probe the two engines with the model (and with --earlier weights): re-scoring tells "
        "these causes apart.",
        defect=False,
    ),
    "unchecked": Cause(
        "no mismatch between the two columns; whether the tokens come from them was not checked",
        "Record entropies, or score with the training stack: then raw log-probs on both sides "
        "show.",
        defect=False,
    ),
    "too_few": Cause(
        "too few tokens for a verdict",
        "Record more completions, or probe the two engines with the model.",
        defect=False,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause and why it is named.

    Attributes:
        cause: key of `CAUSES`.
        evidence: measurements, one sentence each.
        note: what the title has besides the cause.
        setting: the framework's own setting that the remedy is about; "" if it is not known.
    """

    cause: str
    evidence: tuple[str, ...]
    note: str = ""
    setting: str = ""

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause].title + self.note

    @property
    def remedy(self) -> str:
        """The remedy in words."""
        remedy = CAUSES[self.cause].remedy
        return f"{remedy} Here: {self.setting}." if self.setting else remedy


_SAMPLING = {
    "trl": "GRPOConfig.",
    "verl": "actor_rollout_ref.rollout.",
    "skyrl": "generator.sampling_params.",
    "nemo-rl": "policy.generation.",
    "prime-rl": "orchestrator.train.sampling.",
    "slime": "--rollout-",
    "dcmdp": "rollout.",
}
"""Framework -> where its settings of sampling are."""
_SETTINGS = {
    "temperature": ("temperature",),
    "sharper": ("temperature", "top_p"),
    "support": ("top_p", "top_k"),
}
"""Cause -> names of those settings."""


def setting_of(cause: str, framework: str) -> str:
    """Setting of a framework that the remedy of a cause is about; "" if it is not known."""
    if (framework, cause) == ("verl", "raw_logprobs"):
        return "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
    if framework not in _SAMPLING:
        return ""
    prefix = _SAMPLING[framework]
    names = _SETTINGS.get(cause, ())
    if prefix.startswith("--"):
        names = [name.replace("_", "-") for name in names]
    return ", ".join(prefix + name for name in names)
