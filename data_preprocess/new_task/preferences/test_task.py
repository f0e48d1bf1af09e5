"""Tests of the pairs and the score: python -m unittest."""

import random
import unittest

import task


class TaskTest(unittest.TestCase):
    def test_the_better_response_scores_more(self) -> None:
        for seed in range(100):
            choices = random.Random(seed)
            prompt, better = task.make_problem(choices)
            self.assertGreater(task.score(better, better), task.score(task.worse(choices, prompt, better), better), prompt)


if __name__ == "__main__":
    unittest.main()
