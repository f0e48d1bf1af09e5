"""A complete run whose reward function never returns."""

from pathlib import Path

import pytest

from tests.runs import make_task, metrics_of, ppo_arguments
from trainer import main_ppo

STUCK = """
import time
answers = 0
def compute_score(data_source, solution_str, ground_truth, extra_info):
    global answers
    answers += 1
    while answers > 32:
        time.sleep(1)
    return answers / 32
"""


def test_hanging_reward_function_ends_the_run_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, run_dir = make_task(tmp_path / "task", train_size=32, test_size=8, sft_size=8), tmp_path / "run"
    (task / "reward.py").write_text(STUCK)
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, "timeouts.reward=2")) == 1
    output = capsys.readouterr().err
    error = output[output.index("error: ") :].splitlines()
    assert error[:2] == ["error: scoring, limited by timeouts.reward=2, took more than 2 s", "step 2, phase reward"]
    assert f"{task}/reward.py:8 in compute_score; worked on 32 answers" in error[2] and len(error) < 10
    assert error[-1] == f"stacks, memory, logs: {run_dir}/logs/stall_2_reward"
    assert [step["training/global_step"] for step in metrics_of(run_dir)] == [1]
    assert "scoring took too long" in (run_dir / "report.html").read_text()
