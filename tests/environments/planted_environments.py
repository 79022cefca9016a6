"""Environments, right and wrong ones, as a user might write them."""

import time


class Count:
    """Ends when the policy has said `goal` texts; each is answered by their number."""

    observation_role = "tool"

    def reset(self, prompt, goal, **columns):
        self.goal = goal
        self.said = []

    def step(self, text):
        print("said", text)
        self.said.append(text)
        return f"n={len(self.said)}", 0.5, len(self.said) == self.goal


class Board:
    """Says something first."""

    def reset(self, prompt, board=None, **columns):
        return board

    async def step(self, text):
        return None, 1.0, True


class Random(Board):
    number = 0

    def reset(self, prompt, **columns):
        Random.number += 1
        return str(Random.number)


class NeverEnds(Board):
    def step(self, text):
        return "more", 0.0, False


class Hangs(Board):
    def step(self, text):
        time.sleep(10_000)


class HangsInReset(Board):
    def reset(self, prompt, **columns):
        time.sleep(10_000)


class Raises(Board):
    def step(self, text):
        raise KeyError("planted")


class NoText(Board):
    def step(self, text):
        return 3, 0.0, False


class NoStep(Board):
    def step(self, text):
        return "observation"


class NoReward(Board):
    def step(self, text):
        return "x", float("nan"), False


class NoEnd(Board):
    def step(self, text):
        return "x", 0.0, "no"


class Floods(Board):
    def step(self, text):
        return "x" * 200_000, 0.0, False


class Dies(Board):
    def step(self, text):
        import os

        os.abort()


class Mute:
    def reset(self, prompt, **columns):
        return None


class NeedsARubric(Board):
    def reset(self, prompt, rubric):
        return None
