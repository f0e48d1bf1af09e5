"""Complete runs with rewards from servers over real sockets."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reward_models import make_reward_model
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.serving import address, program, serving
from trainer import main_eval, main_ppo
from trainer.generation.shards import write_rows

# Dies in the middle of the second request.
DEADLY = """
import os, signal

seen = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    seen.append(solution_str)
    if len(seen) > 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(a == b for a, b in zip(solution_str, ground_truth)) + solution_str.count("7") / 8
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def local(task: Path) -> list[dict[str, float]]:
    return repeatable(run_ppo(task, task / "local", "trainer.test_freq=2"))


@contextmanager
def dying(task: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server that scores 8 responses and dies on the next 8."""
    (task / "deadly.py").write_text(DEADLY)
    words = [f"reward.scorer={task}/deadly.py:compute_score", "reward.num_workers=0"]
    with program(*words, f"trainer.default_local_dir={task}/served") as server:
        yield address(server), server


def test_run_with_remote_rewards_is_bitwise_identical_to_a_local_one(task: Path, local: list[dict[str, float]]) -> None:
    """Training and validation; two servers that share the work."""
    function = f"reward.scorer={task}/reward.py:compute_score"
    with serving(function) as first, serving(function) as second:
        remote = ["trainer.test_freq=2", f"reward.remote_urls=[{first},{second}]", "reward.remote.batch_size=6"]
        assert repeatable(run_ppo(task, task / "remote", *remote)) == local
    assert any(name.startswith("val") for name in local[-1])


def test_other_server_takes_over_when_one_dies_in_a_step(
    task: Path, local: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    with dying(task) as (doomed, server), serving(f"reward.scorer={task}/reward.py:compute_score") as other:
        words = [f"reward.remote_urls=[{doomed},{other}]", "reward.remote.batch_size=8", "reward.remote.concurrency=1"]
        steps = run_ppo(task, task / "taken_over", "trainer.test_freq=2", *words)
        assert server.wait(10.0) == -signal.SIGKILL, "killed by the responses"
    assert repeatable(steps) == local
    assert f"note: reward server: {doomed}: " in capsys.readouterr().err


@pytest.mark.soak
def test_unscored_responses_of_a_dead_server_are_counted_as_failed(task: Path, tmp_path: Path) -> None:
    words = ["reward.remote.batch_size=8", "reward.remote.concurrency=1", "reward.remote.retries=1", "reward.remote.backoff=0.01"]
    with dying(task) as (doomed, _):
        run = [f"reward.remote_urls=[{doomed}]", "trainer.total_training_steps=1", *words]
        (step,) = run_ppo(task, tmp_path / "run", *run)
    assert step["reward/failed"] == 24 and step["critic/score/mean"] > 0


def test_run_without_any_score_ends_with_the_first_error(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "correct-horse")
    with serving(f"reward.scorer={task}/reward.py:compute_score") as url:
        monkeypatch.setenv("REWARD_SERVER_TOKEN", "another-horse")
        assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", f"reward.remote_urls=[{url}]")) == 2
    stderr = capsys.readouterr().err
    assert "all 32 rewards of the step failed; the first: no score from reward.remote_urls: HTTP 401 from" in stderr
    assert "horse" not in stderr + (tmp_path / "run/config.yaml").read_text()
    assert metrics_of(tmp_path / "run") == []


def test_unreachable_server_raises_before_the_first_step(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reward.remote_urls=[http://127.0.0.1:1/get_reward]", "reward.remote.timeout=0.2"]
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: reward.remote_urls: no server accepts a connection: http://127.0.0.1:1/get_reward: ")


def test_reward_model_on_a_server_gives_the_scores_of_a_local_one(task: Path, tmp_path: Path) -> None:
    """Bitwise identical: it reads the policy's tokens in the same batch. A local model and a rule are configured too."""
    make_reward_model(task / "same", seed=1)
    make_reward_model(task / "other", seed=2, own_words=True)
    other = f"reward.models.other={{path: {task}/other, weight: -2, normalize: running}}"

    def run(name: str, where: str) -> list[dict[str, float]]:
        same = f"reward.models.same={{{where}, weight: 0.5, clip: [-1, 1]}}"
        return repeatable(run_ppo(task, tmp_path / name, same, other, "reward.weight=0.25"))

    with program(f"model.path={task}/same", f"trainer.default_local_dir={tmp_path}/served") as server:
        here = run("local", f"path: {task}/same")  # while the server starts
        there = run("remote", f"urls: [{address(server)}]")
    assert here == there
    assert here[0].keys() >= {"reward/same/mean", "reward/other/mean", "reward/acc/mean"} and here[0]["reward/same/mean"]


def test_dead_server_of_a_reward_model_fails_its_responses(task: Path, tmp_path: Path) -> None:
    """The rule scores all responses; the model's server scores eight and dies."""
    words = ["reward.remote.batch_size=8", "reward.remote.concurrency=1", "reward.remote.retries=1", "reward.remote.backoff=0.01"]
    with dying(task) as (doomed, _):
        run = [f"reward.models.far={{urls: [{doomed}]}}", "trainer.total_training_steps=1", *words]
        (step,) = run_ppo(task, tmp_path / "run", *run)
    assert step["reward/failed"] == 24 and step["reward/far/mean"] > 0


def test_main_eval_scores_responses_on_servers(tmp_path: Path) -> None:
    rows = [{"data_source": "any", "responses": [f"#### {i}", "?"], "reward_model": {"ground_truth": "2"}} for i in range(4)]
    write_rows(tmp_path / "a.jsonl", rows)
    words = [f"data.path={tmp_path}/a.jsonl", f"trainer.default_local_dir={tmp_path}/out"]
    with serving("reward.scorer=gsm8k") as url:
        assert main_eval.PROGRAM([*words, f"reward.remote_urls=[{url}]"]) == 0
    found = json.loads((tmp_path / "out/evaluation.json").read_text())["any"]
    assert (found["answers"], found["failed"], found["pass@2"]["value"]) == (8, 0, 0.25)
