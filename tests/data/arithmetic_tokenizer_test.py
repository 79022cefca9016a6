"""The small tokenizer: exact round trips, fixed ids, and AutoTokenizer's reading of it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dcmdp_jax.data.arithmetic import LEVELS, ArithmeticSpec, arithmetic_problems, build_tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return AutoTokenizer.from_pretrained(str(directory))


_BUILT = build_tokenizer()


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=60),
        st.lists(
            st.sampled_from(
                [r"\boxed{", "user", "assistant", "use", "r", "}", " ", "\n", "17", "="]
            )
        ).map("".join),
    )
)
def test_decoding_an_encoding_is_the_identity(text):
    assert _BUILT.decode(_BUILT(text)["input_ids"]) == text


def test_every_text_of_the_task_comes_back(loaded):
    for difficulty in LEVELS:
        for problem in arithmetic_problems(ArithmeticSpec(difficulty, 50, error_rate=0.5)):
            for text in (problem.prompt, problem.solution):
                ids = loaded(text)["input_ids"]
                assert loaded.unk_token_id not in ids
                assert loaded.decode(ids) == text
                assert ids == _BUILT(text)["input_ids"]


def test_tokens_and_ids(loaded):
    assert len(loaded) == 4 + 4 + 1 + 95  # specials, whole pieces, the line break, printable ASCII
    assert (loaded.pad_token, loaded.pad_token_id) == ("<|endoftext|>", 0)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|im_end|>", 2)
    assert loaded.tokenize(r"9*2=18;\boxed{18}") == [
        "9",
        "*",
        "2",
        "=",
        "1",
        "8",
        ";",
        r"\boxed{",
        "1",
        "8",
        "}",
    ]


def test_chat_template(loaded):
    text = loaded.apply_chat_template(
        [{"role": "user", "content": "1+2=?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+2=?<|im_end|>\n<|im_start|>assistant\n"
    # start, "user", break, 5 characters, end, break, start, "assistant", break
    assert len(loaded(text)["input_ids"]) == 13
    assert (
        loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True)
        == "user\n1+2=?\nassistant\n"
    )
