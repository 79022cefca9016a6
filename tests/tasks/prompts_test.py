"""Prompts as token ids, and the refusals of a tokenizer that can't make them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dcmdp_jax.tasks.arithmetic_tokenizer import build_tokenizer
from dcmdp_jax.tasks.problems import Problem
from dcmdp_jax.tasks.prompts import encode_prompts, end_token_ids, load_tokenizer, save_tokenizer


def _problem(prompt: str, index: int = 0, context: tuple[tuple[str, str], ...] = ()) -> Problem:
    return Problem(prompt=prompt, answer="1", source="test", index=index, context=context)


def _tokenizer_that_adds_a_beginning() -> PreTrainedTokenizerFast:
    """Like Llama's: the template writes <s> itself, and so would the tokenizer."""
    words = {"<s>": 0, "</s>": 1, "unk": 2, "one": 3, "two": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="unk"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="<s>{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def test_the_ids_are_those_of_the_template() -> None:
    tokenizer = build_tokenizer()
    encoded = encode_prompts(
        [_problem("1+2=?", context=(("system", "Add."),))], tokenizer, prompt_suffix="\nGo.", max_prompt_tokens=64
    )
    assert tokenizer.decode(encoded.token_ids[0]) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=?\nGo.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoded.token_ids[0].dtype == np.int32


def test_special_tokens_are_not_doubled() -> None:
    tokenizer = _tokenizer_that_adds_a_beginning()
    assert tokenizer("one")["input_ids"] == [0, 3]  # the trap: this tokenizer adds <s> unasked
    encoded = encode_prompts([_problem("one two")], tokenizer, max_prompt_tokens=9)
    assert encoded.token_ids[0].tolist() == [0, 3, 4]


def test_long_prompts_are_dropped_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    problems = [_problem("1+2=?", 0), _problem("1+2+3=?", 1), _problem("4+5=?", 2)]
    # 8 tokens of template; 5 and 7 characters
    encoded = encode_prompts(problems, build_tokenizer(), max_prompt_tokens=13)
    assert [problem.index for problem in encoded.problems] == [0, 2]
    assert [len(ids) for ids in encoded.token_ids] == [13, 13]
    assert encoded.dropped == 1
    assert "1 of 3 prompts are over max_prompt_tokens = 13 (the longest has 15)" in caplog.text
    with pytest.raises(ValueError, match="max_prompt_tokens = 12 leaves no prompt: the shortest has 13"):
        encode_prompts(problems, build_tokenizer(), max_prompt_tokens=12)
    with pytest.raises(ValueError, match="max_prompt_tokens = 0"):
        encode_prompts(problems, build_tokenizer(), max_prompt_tokens=0)


def test_refused_tokenizers(tmp_path: Path) -> None:
    without_template = build_tokenizer()
    without_template.chat_template = None
    with pytest.raises(ValueError, match="no chat template; put"):
        encode_prompts([_problem("1")], without_template, max_prompt_tokens=9)
    without_end = build_tokenizer()
    without_end.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_prompts([_problem("1")], without_end, max_prompt_tokens=9)
    without_template.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(str(tmp_path))


def test_a_template_that_refuses_is_one_line() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ValueError, match="can't render problem 4 of test: no system messages"):
        encode_prompts([_problem("1", 4)], tokenizer, max_prompt_tokens=9)


def test_load_tokenizer(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(str(tmp_path / "good")).eos_token == "<|im_end|>"
    with pytest.raises(ValueError, match="no such directory"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="not loadable") as raised:
        load_tokenizer(str(tmp_path / "empty"))
    assert "\n" not in str(raised.value)


def test_a_saved_tokenizer_keeps_every_end_token(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(), tmp_path, (2, 7))
    assert end_token_ids(load_tokenizer(str(tmp_path)), tmp_path) == (2, 7)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 7]}


def test_end_tokens_are_the_union(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    assert end_token_ids(tokenizer) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 0]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_token_ids(tokenizer, tmp_path) == (0, 2, 5, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_token_ids(tokenizer, tmp_path) == (0, 2, 9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        end_token_ids(tokenizer, tmp_path)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        end_token_ids(tokenizer)
