"""Runs that are killed in mid-conversation, or whose agent process is, are bitwise identical to undisturbed ones."""

import os
import signal
from pathlib import Path
from random import Random

import pytest

from tests.kills import Kill, Outcome, run_and_kill
from tests.runs import metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.agents.sessions.test_session_flow_runs import (  # noqa: F401 - fixtures
    MODES,
    MULTI_TURN,
    RUN,
    calculator_file,
    dump,
    short_ticks,
    task,
)
from tests.trainer.ppo.test_loop_kills import content, kill_and_compare, table  # noqa: F401 - a fixture
from tests.warm import warm_python
from trainer.agents.sessions.pool import AgentPool
from trainer.run.run_dir import ROLLOUTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
PLACES = ("gen", "gen", "gen", "reward", "update_actor", "save_checkpoint", "write", "rename", "latest")
STEPS = range(2, 8)


def options(folder: Path, kind: str) -> tuple[str, ...]:
    """Calls of a function tool and random lengths, a pure environment, or a program with several calls at the same time."""
    users = {
        "tool": (f"{MULTI_TURN}.function_tool_path={calculator_file()}", f"{MULTI_TURN}.format={folder / 'parser.py'}:parse"),
        "environment": (f"{MULTI_TURN}.environment={folder / 'environment.py'}:Count",),
        "program": (
            f"actor_rollout_ref.rollout.agent.program={folder / 'program.py'}:wide",
            f"{MULTI_TURN}.max_assistant_turns=5",
        ),
    }
    return (*RUN, *MODES["partial"], *users[kind], "reward.num_workers=1", f"trainer.total_training_steps={STEPS.stop}")


def random_kills(seed: int) -> list[Kill]:
    """A kill in each of STEPS; the third time the agents have to end by themselves, the last time they die before the driver."""
    random = Random(seed)
    first = ["driver", "driver", "alone", "driver", "driver", "workers"]
    return [
        Kill(step, random.choice(PLACES), random.uniform(0.0, 0.2), who, backend="local")  # type: ignore[arg-type]
        for step, who in zip(STEPS, first, strict=True)
    ]


@pytest.mark.parametrize(("kind", "seed"), [("tool", 1), ("environment", 2), ("program", 3)])
def test_kills_in_mid_conversation_leave_the_run_bitwise_identical(
    kind: str,
    seed: int,
    task: Path,  # noqa: F811
    tmp_path: Path,
    table: list[Outcome],  # noqa: F811
) -> None:
    """Eighteen kills in all, with conversations in flight in the checkpoint that the next start begins with."""
    kills, whole = random_kills(seed), tmp_path / "whole"
    with warm_python(tmp_path) as python:
        words = ppo_arguments(task, whole, *options(task, kind), f"trainer.rollout_data_dir={whole / ROLLOUTS}")
        run_and_kill(words, whole, [], tmp_path / "unkilled", last="local", python=python)
        table += kill_and_compare(task, tmp_path, options(task, kind), kills, whole, last="local", python=python)
    in_flight = {step["training/global_step"]: step.get("rollout/unfinished_groups", 0.0) for step in metrics_of(whole)}
    # A start resumes from the step before the kill, or from that of the kill if it came after the save.
    assert all(in_flight[kill.step - 1] > 0 and in_flight[kill.step] > 0 for kill in kills)
    journals = [value for name, value in content(whole).items() if name.endswith(" turn_input_ids")]
    assert sum(bool(tokens) for _, _, tokens in journals) >= 4, "turns of unfinished conversations"


@pytest.mark.parametrize(("kind", "seed"), [("tool", 1), ("environment", 2), ("program", 3)])
def test_kills_of_the_agent_process_leave_the_run_bitwise_identical(
    kind: str,
    seed: int,
    task: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five times: while it has turns that it has not answered, or before it gets them."""

    def run(name: str) -> list[dict[str, float]]:
        words = (*options(task, kind), f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")
        return repeatable(run_ppo(task, tmp_path / name / "run", *words))

    whole, replies = run("whole"), Random(seed)
    moments, count = {6 * i + replies.randrange(4) for i in range(1, 6)}, iter(range(1000))
    reply, killed = AgentPool.reply, list[AgentPool]()

    def killing(pool: AgentPool, turns: dict[int, object]) -> None:
        if is_due := next(count) in moments:
            killed.append(pool)
        after = is_due and replies.random() < 0.5
        if after:
            reply(pool, turns)  # type: ignore[arg-type]
        if is_due:
            os.kill(pool._homes[0].pid, signal.SIGKILL)
        if not after:
            reply(pool, turns)  # type: ignore[arg-type]

    monkeypatch.setattr(AgentPool, "reply", killing)
    assert run("killed") == whole
    assert len(killed) == 5 == killed[0].deaths
    for step in range(1, STEPS.stop + 1):
        first, second = dump(tmp_path / "whole", step), dump(tmp_path / "killed", step)
        assert all(first[name].equal(second[name]) for name in first if name != "json")  # which has the seconds of tools
