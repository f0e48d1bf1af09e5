"""The trial of a dry run finds what cannot work: rewards that fail, responses that do not end, too few tokens."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs import make_task, ppo_arguments, without_eos
from trainer import main_ppo
from trainer.planner import trial

Plan = Callable[..., list[str]]
REWARD = "reward.custom_reward_function.path"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), train_size=30, test_size=8, sft_size=8)


@pytest.fixture
def plan(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    def planned(*overrides: str) -> list[str]:
        capsys.readouterr()
        assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *overrides, "trainer.dry_run=full")) == 0, (
            capsys.readouterr().err
        )
        return capsys.readouterr().out.splitlines()

    return planned


def function(folder: Path, body: str) -> str:
    """Override with a reward function of this body."""
    path = folder / f"reward{len([*folder.glob('*.py')])}.py"  # a file is loaded once per process
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return f"{REWARD}={path}"


def test_prompt_response_and_scores_are_shown(task: Path, plan: Plan, tmp_path: Path) -> None:
    output = plan(function(tmp_path, "return len(solution_str) / 100"))
    start = output.index("a trial of some prompts")
    first = pq.read_table(task / "train.parquet").to_pylist()[0]
    text = first["prompt"][0]["content"] if isinstance(first["prompt"], list) else first["prompt"]
    assert any(line.startswith("  a prompt, ") and "tokens: '" in line for line in output[start:])
    assert text and output[start + 2].startswith("  16 responses of at most 8 tokens, ")
    assert any(line.startswith("  scores of the responses: mean ") for line in output[start:])
    assert output[-1].startswith("fine, ")


@pytest.mark.parametrize(
    ("body", "failed"), [("return 1 / 0", "20 of 20"), ("return 1.0 / (solution_str != ground_truth)", "4 of 20")]
)
def test_rewards_that_fail_are_reported_with_their_line(body: str, failed: str, plan: Plan, tmp_path: Path) -> None:
    output = plan(function(tmp_path, body))
    assert output[-2].startswith(f"{failed} rewards of the trial failed: ZeroDivisionError: ") and "reward0.py:2" in output[-2]
    assert output[-1].startswith("no training was started")


def test_equal_scores_are_reported(plan: Plan, tmp_path: Path) -> None:
    line = "  all are equal: a group in which they are has no gradient"
    assert line in plan(function(tmp_path, "return 0.5"))
    assert line not in plan(function(tmp_path, "return len(solution_str) % 5 + hash(solution_str) % 7"))


def test_ground_truth_that_is_longer_than_a_response_is_reported(task: Path, plan: Plan, tmp_path: Path) -> None:
    table = pq.read_table(task / "train.parquet").to_pylist()
    for row in table:
        row["reward_model"]["ground_truth"] = "123456789012"
    path = tmp_path / "long.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    problem = "data.max_response_length=8: the ground truth of 4 of 4 prompts has more tokens, up to 12; raise it"
    assert problem in plan(f"data.train_files={path}")
    assert problem not in plan(f"data.train_files={path}", function(tmp_path, "return 0.0")), "may be the tests of a program"


def test_responses_that_do_not_end_are_reported(task: Path, plan: Plan, tmp_path: Path) -> None:
    endless = f"actor_rollout_ref.model.path={without_eos(task / 'base', tmp_path / 'endless')}"
    line = (
        "no response of the trial ended within data.max_response_length=8 tokens: raise it, or use a model that has learnt to end"
    )
    assert line in plan(endless)
    assert line not in plan(endless, "actor_rollout_ref.rollout.ignore_eos=true")


def test_large_models_generate_nothing(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LARGEST", 1000)
    output = plan()
    assert "  no responses: a dry run generates with models of 0.001 million parameters at most" in output
    assert any(line.startswith("  score of the ground truth") for line in output)


def test_the_trial_asks_no_judge(plan: Plan) -> None:
    judge = ("reward.scorer=judge", "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m")
    own = f"{REWARD}=null"
    assert "  no scores: a judge would be asked" in plan(*judge, own, "reward.judge.prompt='{answer}'")


def test_the_trials_engine_has_room_for_its_own_rows_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    engine = trial.EmbeddedRollout
    monkeypatch.setattr(trial, "EmbeddedRollout", lambda spec: (made.append(spec), engine(spec))[1])
    plan("data.max_response_length=8000")
    assert made[0].max_model_len <= 64 + trial.TOKENS and made[0].rollout.max_num_seqs == 16


def test_a_reward_that_hangs_is_late(plan: Plan, tmp_path: Path) -> None:
    output = plan(function(tmp_path, "import time; time.sleep(60)"), "reward.timeout=0.1")
    assert output[-2].startswith("20 of 20 rewards of the trial failed: ")


def test_ground_truths_of_other_types_are_named_or_tried_as_text(task: Path, plan: Plan, tmp_path: Path) -> None:
    rows = pq.read_table(task / "train.parquet").to_pylist()
    reward = function(tmp_path, "return float(str(ground_truth) in solution_str)")
    for truth, line in ((7, "  score of the ground truth as response: mean 1"), (["7"], "  the ground truth of row 0 is a list")):
        file = tmp_path / f"{type(truth).__name__}.parquet"
        pq.write_table(pa.Table.from_pylist([row | {"reward_model": {"ground_truth": truth}} for row in rows]), file)
        output = plan(reward, f"data.train_files={file}")
        assert any(found.startswith(line) for found in output), output
