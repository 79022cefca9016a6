"""Two rows as verl's data sets have them."""

CODE = {
    "data_source": "codecontests",
    "prompt": [{"role": "user", "content": "Add two numbers."}],
    "ability": "code",
    "reward_model": {"style": "rule", "ground_truth": {"inputs": ["1 2"], "outputs": ["3"]}},
    "extra_info": {"index": 0, "split": "train"},
}
SEARCH = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Who wrote Faust?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Goethe", "J. W. von Goethe"]}},
    "extra_info": {"index": 1, "split": "train"},
}
