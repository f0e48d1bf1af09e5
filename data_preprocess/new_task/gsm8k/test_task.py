"""Tests of the rows and the score: python -m unittest."""

import unittest

import task


class TaskTest(unittest.TestCase):
    def test_the_answer_of_an_example_scores_1(self) -> None:
        example = {"question": "500 + 534?", "answer": "Together 1,034. #### 1,034"}
        answer = task.make_row(example, "train", 0)["reward_model"]["ground_truth"]
        self.assertEqual(answer, "1034")
        self.assertEqual(task.score(example["answer"], answer), 1.0)

    def test_another_number_and_no_number_score_0(self) -> None:
        self.assertEqual([task.score(text, "5") for text in ("#### 4", "5", "#### 5, or #### 6")], [0.0, 0.0, 0.0])


if __name__ == "__main__":
    unittest.main()
