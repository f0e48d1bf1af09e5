"""Command lines of verl's users, run for real: two steps, a clean end. On two workers: scripts/test.sh soak."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from data_preprocess import tiny_model
from data_preprocess.writer import rl_row, write
from tests.runs import metrics_of
from tests.trainer.verl_commands import LONG_ANSWERS, SMALL_BATCH, SMALL_RUN
from trainer import main_ppo


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads text, and two small data sets at the paths of the command lines."""
    folder = tmp_path_factory.mktemp("verl")
    alphabet = "".join(map(chr, range(32, 127)))
    tiny_model.main([f"--save_dir={folder / 'model'}", "--hidden_size=32", f"--alphabet={alphabet}"])
    for place, source in (("data", "openai/gsm8k"), ("data/math", "sort_digits")):
        for split, n in (("train", 24), ("test", 5)):
            rows = [
                rl_row(data_source=source, prompt=f"{i} + {i} = ?", ability="math", ground_truth=str(2 * i), split=split, index=i)
                for i in range(n)
            ]
            write(rows, folder / place, split)
    return folder


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        pytest.param(SMALL_BATCH, ("trainer.backend=local", "trainer.n_gpus_per_node=1"), id="small_batch"),
        pytest.param(SMALL_BATCH, (), id="small_batch_two_workers", marks=pytest.mark.soak),
        pytest.param(LONG_ANSWERS, (), id="long_answers_two_workers", marks=pytest.mark.soak),
    ],
)
def test_verl_command_lines_train_unchanged(
    command: str,
    workers: tuple[str, ...],
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """bash reads the text, and the program gets the words in this process."""
    small = [f"actor_rollout_ref.model.path={task}/model", f"critic.model.path={task}/model", *SMALL_RUN, *workers]
    shell = f"python3() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    environment = {"DATA_DIR": f"{task}/data", "TIME": "now", "TANDEM_TEST_RUN": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
    module, *words = read.stdout.removesuffix("\0").split("\0")[1:]
    assert module == "trainer.main_ppo"
    monkeypatch.chdir(tmp_path)
    code = main_ppo.PROGRAM([*words, *small])
    out, err = capfd.readouterr()
    assert code == 0 and "Traceback" not in err, err
    (log,) = tmp_path.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert {"critic/vf_loss", "actor/pg_loss", "critic/values/mean", "timing_s/update_critic"} <= steps[0].keys(), "PPO with GAE"
    assert "val/accuracy" in steps[1] and "actor/kl_loss" not in steps[0]
    for word in ("tensor_model_parallel_size", "gpu_memory_utilization"):
        assert sum(word in line and "no effect" in line for line in err.splitlines()) == 1
    if "wandb" in command:
        assert sum(line.startswith("logger wandb left out") for line in err.splitlines()) == 1
    assert out.splitlines()[-1].startswith("report: ")
    assert survivors(str(tmp_path)) == []


def survivors(mark: str) -> list[str]:
    """Processes that the run left behind, found by their inherited environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TANDEM_TEST_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:  # of another user, or no longer running
            continue
    return found


# One file for everything, as ReTool has it.
OWN = """
import pyarrow.parquet as pq

from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo


class Sandbox(SandboxFusionTool):
    pass


class Doubled(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.dataframe = [row for folder in self.data_files for row in pq.read_table(folder).to_pylist()]
        for row in self.dataframe:
            row["prompt"][0]["content"] += " Box it."
            row["agent_name"] = "tool_agent"


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    result["score"] += 0.1 * extra_info["num_turns"]
    return {"score": result["score"], "pred": result["pred"] or ""}
"""


def test_a_data_set_class_a_tool_and_a_reward_in_the_form_of_retool_train(task: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    tools = tmp_path / "tools.yaml"
    schema = {
        "type": "function",
        "function": {"name": "run", "description": "Run.", "parameters": {"type": "object", "properties": {}}},
    }
    tools.write_text(
        json.dumps({"tools": [{"class_name": f"{own}:Sandbox", "config": {"type": "native"}, "tool_schema": schema}]})
    )
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "part.parquet").symlink_to(task / "data" / f"{split}.parquet")
    tiny_model.main(
        [f"--save_dir={tmp_path}/model", "--hidden_size=32", "--tools", f"--alphabet={''.join(map(chr, range(32, 127)))}"]
    )
    words = [
        f"data.train_files=[{tmp_path}/train]", f"data.val_files=[{tmp_path}/test]", "data.return_raw_chat=True",
        f"data.custom_cls.path={own}", "data.custom_cls.name=Doubled", f"custom_reward_function.path={own}",
        "custom_reward_function.name=compute_score", f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.multi_turn.enable=True",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}", "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo", f"trainer.default_local_dir={tmp_path}/run", "trainer.logger=[]", "trainer.save_freq=-1",
    ]  # fmt: skip
    # The longest prompt: with the schema of the tool.
    small = [
        *SMALL_RUN,
        "data.max_prompt_length=1024",
        "trainer.backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=2",
    ]
    assert main_ppo.PROGRAM([*words, *small]) == 0
    *_, last = metrics_of(tmp_path / "run")
    assert last["training/global_step"] == 2 and last["actor/grad_norm"] > 0
    # Two turns, the question and the answer, which has no box.
    assert last["critic/score/mean"] == pytest.approx(-0.8, abs=0.05)


TOKEN_LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        assert self.config.actor_rollout_ref.rollout.response_length == 32 and self.config.data.max_prompt_length == 64
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        n, mask = len(ids), []
        # A turn that is sampled and not used, before every second answer.
        for turn in range(3 - kwargs["extra_info"]["index"] % 2):
            params = sampling_params | {"max_tokens": 6}
            found = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=params)
            if turn == 2:
                break
            seen = self.tokenizer.encode(" Again: ", add_special_tokens=False)
            ids += found.token_ids + seen
            mask += [1] * len(found.token_ids) + [0] * len(seen)
        return AgentLoopOutput(prompt_ids=ids[:n], response_ids=ids[n:], response_mask=mask, num_turns=2, metrics={},
                               reward_score=float(len(mask)))
"""


def test_a_loop_on_token_ids_in_verls_form_trains(task: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(TOKEN_LOOP)
    (tmp_path / "agent.yaml").write_text(f"- name: two\n  _target_: {tmp_path}/loop.py:TwoTurns\n")
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet", "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={task}/model", f"{rollout}.agent.agent_loop_config_path={tmp_path}/agent.yaml",
        f"{rollout}.agent.default_agent_loop=two", f"{rollout}.n=2", "trainer.logger=[]", 
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.test_freq=2", "trainer.save_freq=1",
    ]  # fmt: skip
    small = [*SMALL_RUN, "trainer.backend=local", "trainer.n_gpus_per_node=1"]
    assert main_ppo.PROGRAM([*words, *small]) == 0
    *_, last = metrics_of(tmp_path / "run")
    assert last["training/global_step"] == 2 and last["actor/grad_norm"] > 0 and last["critic/score/mean"] > 2 * len(" Again: ")
    assert main_ppo.PROGRAM([*words, *small, "trainer.total_training_steps=3"]) == 0
