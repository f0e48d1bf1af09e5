"""Tests of the score: python -m unittest."""

import random
import unittest

import task


class TaskTest(unittest.TestCase):
    def test_the_answer_of_every_problem_scores_1(self) -> None:
        for seed in range(100):
            prompt, answer = task.make_problem(random.Random(seed))
            self.assertEqual(task.compute_score("", answer, answer, {}), {"score": 1.0, "acc": 1.0}, prompt)

    def test_another_response_scores_less(self) -> None:
        self.assertEqual(task.score("", "fedcba"), 0.0)
        self.assertEqual(task.score("fed", "fedcba"), 0.5)
        self.assertEqual(task.compute_score("", "fedcbab", "fedcba", {})["acc"], 0.0)


if __name__ == "__main__":
    unittest.main()
