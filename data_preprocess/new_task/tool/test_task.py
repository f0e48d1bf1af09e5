"""Tests of the tool and the score: python -m unittest."""

import random
import unittest

import task


class TaskTest(unittest.TestCase):
    def test_worked_examples_score_1(self) -> None:
        for seed in range(100):
            choices = random.Random(seed)
            prompt, answer = task.make_problem(choices)
            *_, result, last = task.example(choices, prompt, answer)
            response = f"<tool_response>{result['content']}</tool_response>{last['content']}"
            self.assertEqual(task.score(response, answer), 1.0, prompt)

    def test_the_result_alone_is_no_answer(self) -> None:
        self.assertEqual(task.score("<tool_response>6</tool_response>", "6"), 0.0)
        self.assertEqual(task.score("<tool_response>6</tool_response>7", "6"), 0.0)


if __name__ == "__main__":
    unittest.main()
