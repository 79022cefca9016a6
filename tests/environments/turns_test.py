"""Completions in turns: which tokens are sampled, what ends them, and every way an environment can
fail.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.environments.turns import TurnRules, TurnSampler, answer_text, end_texts
from dcmdp_jax.rewards.protocol import RewardError
from tests.environments import planted_environments

_FILE = planted_environments.__file__
_CALCULATOR = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "calculator.py"
_LONG_S = 1000.0
_TOKENIZER = build_tokenizer()


@dataclasses.dataclass
class _Script:
    """An engine that says, for each turn of each completion, a text; one that ends in "..." is cut.

    Attributes:
        texts: by completion, in the order of rows, its turns.
        tokenizer: encodes them; a turn that writes an end token itself gets no other.
        lists: whether it lists top-k tokens.
    """

    texts: list[list[str]]
    calls: list[tuple] = dataclasses.field(default_factory=list)
    tokenizer: PreTrainedTokenizerBase = _TOKENIZER
    lists: bool = False

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        self.calls.append(
            ([self.tokenizer.decode(ids) for ids in prompts], sampling, seed, step, first_prompt)
        )
        for group in reversed(range(len(prompts))):
            episodes = []
            for member in range(sampling.group_size):
                text = self._next(prompts[group], group * sampling.group_size + member)
                cut = text.endswith("...")
                ids = self.tokenizer(text.removesuffix("..."), add_special_tokens=False)[
                    "input_ids"
                ]
                ends = cut or ids[-1] in sampling.stop_token_ids
                ids = np.array(ids if ends else [*ids, self.tokenizer.eos_token_id], np.int32)
                assert len(ids) <= sampling.max_completion_tokens
                logprobs = -0.5 - np.arange(len(ids), dtype=np.float32) / 8
                place = dict(policy_version=step, group=group, member=member)
                if self.lists:
                    place |= {"top_ids": np.stack([ids, ids + 1], axis=1)}
                    place |= {"top_logprobs": np.stack([logprobs, logprobs - 1], axis=1)}
                end = "length" if cut else "stop"
                episodes.append(
                    single_turn(prompts[group], ids, logprobs, **place, finish_reason=end)
                )
            yield episodes
            yield []

    def _next(self, prompt, row):
        """The turn of the completion that this prompt is of: in the first call by row, later by
        what was said.
        """
        if len(self.calls) == 1:
            return self.texts[row][0]
        if len(self.texts) == 1:
            return self.texts[0][len(self.calls) - 1]
        text = self.tokenizer.decode(prompt)
        said = [part.partition("<|im_end|>")[0] for part in text.split("assistant\n")[1:-1]]
        [turn] = {
            turns[len(said)]
            for turns in self.texts
            if turns[: len(said)] == said and len(turns) > len(said)
        }
        return turn


def _play(
    environment,
    texts,
    rows,
    *,
    group_size=1,
    turns=4,
    turn_tokens=8,
    limit=60,
    timeout_s=_LONG_S,
    **settings,
):
    answers = settings.pop("answers", "unused")
    tokenizer = settings.pop("tokenizer", _TOKENIZER)
    problems = [
        problem_from_row(row, source="f", index=n, keep_columns=True, answers=answers)
        for n, row in enumerate(rows)
    ]
    prompts = encode_prompts(problems, tokenizer, max_prompt_tokens=64).token_ids
    engine = _Script(texts, tokenizer=tokenizer, lists=settings.pop("lists", False))
    columns = sorted({name for row in rows for name in row} - {"prompt"})
    stops = settings.pop("stops", (tokenizer.eos_token_id,))
    sampling = SamplingParams(
        group_size=group_size, max_completion_tokens=limit, stop_token_ids=stops
    )
    name = environment if ":" in environment else f"{_FILE}:{environment}"
    columns = [*columns, "reference_answer"]
    with EnvironmentPool(
        name, columns, timeout_s=timeout_s, output=settings.pop("output", None)
    ) as pool:
        rules = TurnRules(
            columns=columns,
            turns=turns,
            turn_tokens=turn_tokens,
            prompt_tokens=settings.pop("prompt_tokens", 64),
            prompt_suffix="",
            variables={},
            stop_on_error=settings.pop("stop_on_error", True),
        )
        sampler = TurnSampler(engine, pool, tokenizer, rules)
        [*waits, episodes] = sampler.generate(
            prompts, problems, sampling, seed=5, step=7, first_prompt=2
        )
    assert all(wait == [] for wait in waits)
    return episodes, sampler.played, engine.calls


def test_answers_are_given_tokens_between_sampled_ones():
    [episode], played, calls = _play("Count", [["a", "bc"]], [{"prompt": "p", "goal": 2}])
    text = "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n"
    answer = "\n<|im_start|>tool\nn=1<|im_end|>\n<|im_start|>assistant\n"
    assert _TOKENIZER.decode(episode.token_ids) == f"{text}a<|im_end|>{answer}bc<|im_end|>"
    ids = _TOKENIZER(answer, add_special_tokens=False)["input_ids"]
    given = [False] * episode.prompt_length
    mask = [*given, True, True, *([False] * len(ids)), True, True, True]
    np.testing.assert_array_equal(episode.sampled_mask, mask)
    # Log-probs and versions are those of the engine, and of sampled tokens alone.
    np.testing.assert_allclose(
        episode.rollout_logprobs[episode.sampled_mask], [-0.5, -0.625, -0.5, -0.625, -0.75]
    )
    assert (episode.rollout_logprobs[~episode.sampled_mask] == 0).all()
    np.testing.assert_array_equal(episode.policy_versions, np.where(mask, 7, -1))
    assert (episode.num_sampled, episode.finish_reason) == (5, "stop")
    assert played[0].reward == 1.0 and played[0].turns == 2 and played[0].done
    assert played[0].messages == [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "n=1"},
        {"role": "assistant", "content": "bc"},
    ]
    np.testing.assert_array_equal(played[0].ids, episode.completion_ids)
    assert [call[2:] for call in calls] == [(5, 7, 2), (5 + 11_000_027, 7, 2)]
    assert [call[1].max_completion_tokens for call in calls] == [8, 8]


_GEMMA = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"""
_CHATML = _GEMMA.replace("<end_of_turn>", "<|im_end|>")
_COMMAND = _GEMMA.replace("<end_of_turn>", "<end_of_text><end_of_turn>")
_NO_MARK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:"
# As GLM's: a turn ends where the model writes the next speaker.
_SPEAKERS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|model|>"
_SPACED = _GEMMA.replace("<end_of_turn>", " <end_of_turn>")
_ANSWER = "<|im_start|>user\nu<eos>"


def _ends(template, *tokens):
    """The built-in tokenizer with another template, and end tokens that are not its eos_token."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "sampled", "written"),
    [
        (_GEMMA, "<end_of_turn>", f"\n{_ANSWER}<end_of_turn>\n<|im_start|>model\n"),
        (_GEMMA, "<eos>", f"<end_of_turn>\n{_ANSWER}<end_of_turn>\n<|im_start|>model\n"),
        (_CHATML, "<|im_end|>", f"\n{_ANSWER}<|im_end|>\n<|im_start|>model\n"),
        (_CHATML, "<eos>", f"<|im_end|>\n{_ANSWER}<|im_end|>\n<|im_start|>model\n"),
        (_COMMAND, "<end_of_turn>", f"\n{_ANSWER}<end_of_text><end_of_turn>\n<|im_start|>model\n"),
        (_SPACED, "<end_of_turn>", f"\n{_ANSWER} <end_of_turn>\n<|im_start|>model\n"),
        (_NO_MARK, "<eos>", "\nuser: u<eos>\nmodel:"),
        (_SPEAKERS, "<|user|>", "\nu<eos><|model|>"),
        (_SPEAKERS, "<eos>", "<|user|>\nu<eos><|model|>"),
    ],
)
def test_an_answer_begins_behind_the_end_token_that_was_sampled(template, sampled, written):
    """The answer holds an end token itself, which is not the turn's."""
    tokenizer = _ends(template, "<eos>", "<end_of_turn>", "<end_of_text>", "<|user|>", "<|model|>")
    stops = [
        tokenizer.convert_tokens_to_ids(token)
        for token in ("<eos>", "<end_of_turn>", "<|im_end|>", "<|user|>")
    ]
    ends = end_texts(tokenizer, stops)
    end = tokenizer.convert_tokens_to_ids(sampled)
    assert (
        answer_text(tokenizer, [{"role": "user", "content": "u<eos>"}], {}, sampled=end, ends=ends)
        == written
    )
    if sampled != "<eos>" and template != _COMMAND:  # whose first special token ends a text
        assert answer_text(tokenizer, [{"role": "user", "content": "u<eos>"}], {}) == written


@pytest.mark.parametrize(
    ("sampled", "between"),
    [("<end_of_turn>", "\n"), ("<|im_end|>", "<end_of_turn>\n")],
)
def test_a_turn_goes_on_behind_the_token_that_ended_it(sampled, between):
    tokenizer = _ends(_GEMMA, "<end_of_turn>")
    stops = tuple(
        tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<end_of_turn>")
    )
    [episode], played, _ = _play(
        "Count",
        [[f"a{sampled}", f"b{sampled}"]],
        [{"prompt": "p", "goal": 2}],
        tokenizer=tokenizer,
        stops=stops,
        limit=90,
    )
    prompt = "<|im_start|>user\np<end_of_turn>\n<|im_start|>model\n"
    answer = f"{between}<|im_start|>tool\nn=1<end_of_turn>\n<|im_start|>model\n"
    assert tokenizer.decode(episode.token_ids) == f"{prompt}a{sampled}{answer}b{sampled}"
    assert [message["content"] for message in played[0].messages] == ["a", "n=1", "b"]


def test_every_column_of_the_engine_stays_beside_its_token():
    [episode], _, _ = _play("Count", [["a", "bc"]], [{"prompt": "p", "goal": 2}], lists=True)
    sampled = episode.sampled_mask
    assert sampled.sum() == 5
    # The script lists each sampled token and the one after it.
    ids = episode.token_ids[sampled]
    np.testing.assert_array_equal(
        episode.columns["top_ids"][sampled], np.stack([ids, ids + 1], axis=1)
    )
    np.testing.assert_allclose(
        episode.columns["top_logprobs"][sampled, 0], episode.rollout_logprobs[sampled]
    )
    assert (episode.columns["top_ids"][~sampled] == -1).all()


def test_only_sampled_tokens_reach_loss_and_discrepancy():
    episodes, _, _ = _play(
        "Count", [["a", "bc"], ["d"]], [{"prompt": "p", "goal": 2}, {"prompt": "p", "goal": 1}]
    )
    plan = make_row_shapes(
        row_lengths=(80,),
        segments_per_row=1,
        micro_batch_tokens=160,
        mini_batches=1,
        completions=2,
        row_shards=1,
    )
    batch, _ = pack(episodes, np.array([1.0, 0.5], np.float32), plan, mask_truncated=False)
    [rows] = batch.rows
    assert batch.completion_lengths.tolist() == [[5, 2]]
    assert rows.completion_mask.sum() == 7  # the 15 tokens of the answer are read, and in neither
    assert rows.completion_mask.sum() < (rows.segment_ids > 0).sum()


def test_those_that_end_leave_the_others_to_the_next_turn():
    rows = [{"prompt": "p", "goal": 3}, {"prompt": "r", "goal": 2}]
    texts = [["a", "b", "c"], ["e", "f", "g"], ["x", "y"], ["z", "v"]]
    episodes, played, calls = _play("Count", texts, rows, group_size=2, limit=90)
    assert [one.turns for one in played.values()] == [3, 3, 2, 2]
    assert [one.reward for one in played.values()] == [1.5, 1.5, 1.0, 1.0]
    assert [(episode.group, episode.member) for episode in episodes] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    # One prompt for two completions first, then each of those that are left with what it said.
    assert [(len(prompts), sampling.group_size) for prompts, sampling, *_ in calls] == [
        (2, 2),
        (4, 1),
        (2, 1),
    ]
    assert [call[4] for call in calls] == [2, 4, 4]


def test_a_cut_turn_a_full_completion_and_the_last_turn_end_it():
    goal = {"prompt": "p", "goal": 9}
    [cut], played, _ = _play("Count", [["abcdefgh..."]], [goal])
    assert (cut.finish_reason, played[0].turns, played[0].reward) == (
        "length",
        1,
        0.0,
    )  # it is not answered
    # Behind the turn's 2 tokens there is no room for an answer of 15 and another turn of 8: 25, one
    # more than 24.
    [full], played, _ = _play("Count", [["a"]], [goal], limit=24)
    assert (full.finish_reason, full.num_sampled, played[0].reward) == ("length", 2, 0.5)
    assert full.sampled_mask[-1] and not played[0].done
    [last], played, _ = _play("Count", [["a", "b"]], [goal], turns=2)
    assert (last.finish_reason, played[0].turns, played[0].done) == ("stop", 2, False)
    assert last.sampled_mask[-1]


def test_what_reset_says_is_part_of_the_prompt():
    rows = [{"prompt": "p", "board": "x.o"}, {"prompt": "q", "board": None}]
    episodes, played, calls = _play("Board", [["a"], ["b"], ["c"], ["d"]], rows, group_size=2)
    first, _, third, _ = (_TOKENIZER.decode(episode.prompt_ids) for episode in episodes)
    assert first == "<|im_start|>user\np\n\nx.o<|im_end|>\n<|im_start|>assistant\n"
    assert third == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert [one.reward for one in played.values()] == [1.0] * 4 and len(calls) == 1


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ("Hangs", "step gave no result in 0.5 s"),
        ("HangsInReset", "reset gave no result in 0.5 s"),
        ("Raises", "raised KeyError: 'planted' (planted_environments.py, line 56)"),
        (
            "NoText",
            "step returned the int 3 as observation, needs text (completion 0 of the batch)",
        ),
        (
            "NoStep",
            "step returned the str 'observation', needs (observation, reward, done) (completion 0 "
            "of",
        ),
        ("NoReward", "step returned the float nan as reward, needs a number of at most 1e+09"),
        ("NoEnd", "step returned the str 'no' as its third value, which must be True or False"),
        ("Floods", "an observation has 200,000 characters, at most 100,000 are read"),
        ("Dies", "its process died in step"),
        (
            "Random",
            "reset says other things to the completions of one prompt (row 0 of f); it must "
            "depend on",
        ),
    ],
)
def test_an_environment_that_fails_is_one_line_or_counted(environment, problem):
    timeout_s = 0.5 if environment.startswith("Hangs") else _LONG_S
    settings = {"rows": [{"prompt": "p"}], "group_size": 2, "timeout_s": timeout_s}
    with pytest.raises(RewardError) as raised:
        _play(environment, [["a"], ["b"]], **settings)
    assert str(raised.value).startswith(f"environment {_FILE}:{environment}: {problem}")
    assert "\n" not in str(raised.value)
    if environment != "Random":
        episodes, played, _ = _play(environment, [["a"], ["b"]], **settings, stop_on_error=False)
        assert [one.reward for one in played.values()] == [None, None]
        assert [episode.num_sampled for episode in episodes] == [2, 2]


def test_an_environment_that_never_ends_is_ended_and_told(caplog):
    [episode], played, calls = _play(
        "NeverEnds", [["a", "b", "c"]], [{"prompt": "p"}], turns=3, limit=90
    )
    assert (len(calls), played[0].turns, played[0].done, episode.finish_reason) == (
        3,
        3,
        False,
        "stop",
    )
    assert "NeverEnds: 1 of 1 completions ended by task.max_turns = 3" in caplog.text


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ("Nothing", "has no class 'Nothing'; it has Count, Board, "),
        ("Mute", "the class has no method step"),
        (
            "NeedsARubric",
            "reset can't be called as reset(prompt, answer): missing a required argument: 'rubric'",
        ),
    ],
)
def test_an_environment_that_can_not_play_is_told_before_the_run(environment, problem):
    with (
        EnvironmentPool(f"{_FILE}:{environment}", ["answer"], timeout_s=_LONG_S) as pool,
        pytest.raises(RewardError) as raised,
    ):
        pool.check()
    assert problem in str(raised.value)


def test_a_prompt_that_gets_too_long_is_told():
    with pytest.raises(
        RewardError, match="has 18 tokens with the first observation, task.max_prompt_tokens is 17"
    ):
        _play("Board", [["a"]], [{"prompt": "p", "board": "1234567"}], prompt_tokens=17)


def test_what_it_prints_goes_to_the_file(tmp_path):
    _play("Count", [["a"]], [{"prompt": "p", "goal": 1}], output=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "said a\n"


def test_a_worked_second_turn_has_the_tokens_that_the_policy_sees_there():
    task = f"{_CALCULATOR}:calculator,difficulty=2,count=1,seed=3"
    [plain], worked = (load_problems(f"{task}{more}") for more in ("", ",worked=true"))
    call, box = worked
    row = {"prompt": plain.prompt, "answer": plain.answer}
    [episode], played, calls = _play(
        f"{_CALCULATOR}:Calculator",
        [[call.solution, box.solution]],
        [row],
        turn_tokens=20,
        limit=90,
        answers="optional",
    )
    assert played[0].reward == 1.0
    seen = encode_prompts([box], _TOKENIZER, max_prompt_tokens=99).token_ids[0]
    assert calls[1][0] == [_TOKENIZER.decode(seen)]
    np.testing.assert_array_equal(episode.token_ids[: len(seen)], seen)
