"""Tests of the conversation: python -m unittest."""

import random
import unittest

import task


class TaskTest(unittest.TestCase):
    def test_worked_examples_end_with_the_whole_score(self) -> None:
        for seed in range(100):
            choices = random.Random(seed)
            prompt, known = task.make_problem(choices)
            turns = task.conversation(choices, prompt, known)
            spoken = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            scores = [task.reply(spoken[: i + 1], known)[1] for i in range(len(spoken))]
            self.assertAlmostEqual(sum(scores), 1.0)

    def test_a_wrong_turn_scores_nothing(self) -> None:
        self.assertEqual(task.reply(["8"], "7304"), ("3", 0.0, False))


if __name__ == "__main__":
    unittest.main()
