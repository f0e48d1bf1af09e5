"""Replay of a step whose responses are conversations: the same numbers, and no code of a tool runs."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import trainer.rollout.remote_rollout as remote_rollout
from data_preprocess import calculator, tiny_model
from tests.runs import ppo_arguments, run_ppo
from tests.trainer.agents.sessions.test_session_flow_runs import MODES, MULTI_TURN, PARSER, RUN, turns
from trainer import main_ppo
from trainer.agents.sessions.pool import AgentPool
from trainer.run.run_dir import read_lines
from trainer.tracking.batch_file import load_batch, load_sessions

TOOL = '''
from pathlib import Path

from trainer.agents.tools import BaseTool, ToolResponse


def log(line):
    with Path(__file__).with_name("calls.log").open("a") as file:
        file.write(line + "\\n")


class Calculator(BaseTool):
    """Its state, the number of calls, makes its results and its reward."""

    calls = {}

    async def create(self, instance_id=None, **kwargs):
        log("create")
        self.calls[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        log("execute")
        self.calls[instance_id] += 1
        if len(parameters["expression"]) > 6:
            raise ValueError("too long")
        return ToolResponse(text=str(self.calls[instance_id] * 111)), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        log("calc_reward")
        return self.calls[instance_id] / 4

    async def release(self, instance_id, **kwargs):
        log("release")
        del self.calls[instance_id]
'''
TOOL_YAML = """
tools:
  - class_name: {folder}/tool.py:Calculator
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: calculator
        description: Calculate.
        parameters: {{type: object, properties: {{expression: {{type: string, description: E.}}}}, required: [expression]}}
"""
# One response of a group fails: its session is no row of the step, and is replayed too.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 7 == 3:
        raise ValueError("no score")
    return len(solution_str) % 5 + extra_info["rollout_reward_scores"]["calculator"]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    calculator.main([f"--local_save_dir={folder}", "--train_size=16", "--test_size=4", "--sft_size=0"])
    tiny_model.main([f"--save_dir={folder / 'base'}", "--tools", "--alphabet=0123456789+"])
    files = {"parser.py": PARSER, "tool.py": TOOL, "tools.yaml": TOOL_YAML.format(folder=folder), "reward.py": REWARD}
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "mode", ["synchronous", *(pytest.param(mode, marks=pytest.mark.soak) for mode in ("filter_groups", "partial"))]
)
def test_replayed_conversations_are_bitwise_equal_and_call_no_tool(
    mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)
    run_dir, log = tmp_path / "run", task / "calls.log"
    overrides = (
        *RUN, *MODES[mode], f"{MULTI_TURN}.tool_config_path={task}/tools.yaml", f"{MULTI_TURN}.format={task}/parser.py:parse",
        f"trainer.rollout_data_dir={run_dir}/rollouts", "trainer.total_training_steps=2", "trainer.test_freq=1",
        "actor_rollout_ref.rollout.balance=static", "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    )  # fmt: skip
    steps = run_ppo(task, run_dir, *overrides)
    assert steps[1]["agents/tool/calculator/calls"] > steps[1]["agents/tool/calculator/errors"] > 0
    called = log.read_text()
    assert {*called.split()} == {"create", "execute", "calc_reward", "release"}
    capfd.readouterr()
    monkeypatch.setattr(AgentPool, "__init__", lambda *args: pytest.fail("a replay starts no agent process"))
    file = run_dir / "rollouts/step_2.safetensors"
    asked = (*overrides, f"trainer.replay.path={file}")
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *asked, "trainer.replay.mode=train")) == 0
    assert capfd.readouterr().out.strip().endswith("all equal")
    sample_again = main_ppo.PROGRAM(ppo_arguments(task, run_dir, *asked, "trainer.replay.mode=rollout"))
    output = capfd.readouterr()
    if mode == "partial":
        assert sample_again == 2 and "has no record of its conversations (async_training.mode" in output.err
    else:
        assert sample_again == 0 and output.out.strip().endswith("all equal")
        again = run_dir / "replay_rollout_2/rollouts"
        (then, _), (now, _) = load_batch(file), load_batch(again / "step_2.safetensors")
        assert all(then.tokens[name].equal(now.tokens[name]) for name in then.tokens)
        assert then.rows.keys() == now.rows.keys() and all(then.rows[name].equal(now.rows[name]) for name in then.rows)
        for name in ("session", "response", "reward_error"):
            old, new = (pq.read_table(folder / "step_2.parquet")[name].to_pylist() for folder in (run_dir / "rollouts", again))
            assert old == new, "for people too"
        record = load_sessions(file)
        assert record is not None and len(record) > len(then), "dropped conversations are in the record"
        n_sessions = int((record.rows["part"] == 0).sum())
        assert mode != "synchronous" or n_sessions == 4 * 2, "neither earlier steps nor validations"
    assert log.read_text() == called, "no code of the tool ran"
    if mode == "synchronous":
        check_files(run_dir)
        change_first_turn(file)
        assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *asked, "trainer.replay.mode=rollout")) == 3
        assert "error: tokens (1 of " in capfd.readouterr().err and log.read_text() == called


def check_files(run_dir: Path) -> None:
    """What the report reads, and the dumps."""
    samples, answers = read_lines(run_dir / "samples.jsonl"), read_lines(run_dir / "answers.jsonl")
    for entry in (*samples, *answers):
        assert entry["conversation"][0]["role"] == "user" and not entry["conversation"][0]["sampled"]
        assert entry["conversation"][1]["role"] == "assistant" and entry["conversation"][1]["sampled"]
    shown = [turn for entry in answers for turn in entry["conversation"]]
    assert {turn["status"] for turn in shown if turn["role"] == "tool"} == {"ok", "error"}
    assert {turn.get("reward") for turn in shown if turn.get("status") == "ok"} == {0.5}
    assert any(turn.get("calls", [["", ""]])[0][0] == "calculator" for turn in shown)
    with_results = [entry for entry in answers if "observed" in entry]
    assert with_results and all(
        entry["rollout"][i] == 0 for entry in with_results for span in entry["observed"] for i in range(*span)
    )
    assert all(
        "".join(entry["tokens"][slice(*span)]).startswith("<tool_response>")
        for entry in with_results
        for span in entry["observed"]
    )
    page = (run_dir / "report.html").read_text()
    assert 'class="turn sampled"' in page and 'aria-label="Tool calls"' in page and 'aria-label="Turns"' in page
    batch, _ = load_batch(run_dir / "rollouts/step_2.safetensors")
    rows = pq.read_table(run_dir / "rollouts/step_2.parquet").to_pylist()[: len(batch)]
    for row, mask in zip(rows, batch.split_rows("response_mask"), strict=True):
        places = json.loads(row["session"])["turns"]
        inside = {i for part, start, end, *_ in places if part == row["part"] for i in range(start, end)}
        assert inside == {*mask.nonzero().flatten().tolist()}, "a row's sampled tokens are those of its turns"


def change_first_turn(file: Path) -> None:
    """In the record, of a conversation with several: it then was another one than the model samples now."""
    columns, record, (batch, _) = load_file(file), load_sessions(file), load_batch(file)
    assert record is not None
    rows = zip(batch.split_rows("input_ids"), batch.split_rows("response_mask"), strict=True)
    several = next(ids for ids, mask in rows if turns(mask) > 1)
    place = next(i for i, ids in enumerate(record.split_rows("input_ids")) if ids.long().equal(several))
    columns["session_tokens.input_ids"][record.offsets[place] + record.rows["prompt_length"][place]] += 1
    save_file(columns, file)
