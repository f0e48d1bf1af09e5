"""trainer.dry_run=full: its output is what the run then does, and it does not change the configuration."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from safetensors import safe_open

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.runs import make_task, ppo_arguments, run_ppo, without_eos
from trainer import main_ppo
from trainer.planner import dry_run
from trainer.ppo import ppo_builder
from workers.host_memory import Memory

FULL = "trainer.dry_run=full"
SAVED = (
    *("trainer.save_freq=2", "trainer.test_freq=2", "trainer.total_training_steps=4"),
    *(f"actor_rollout_ref.actor.optim.{key}" for key in ("lr_scheduler_type=cosine", "lr=1e-4", "lr_warmup_steps=0")),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), train_size=30, test_size=8, sft_size=8)


def plan(task: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, FULL)) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    return err + out


def refused(task: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, FULL)) == 2
    return capsys.readouterr().err


def test_model_without_eos_is_reported(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files name no EOS; its tokenizer class has a default one, outside the model's vocabulary."""
    model = f"actor_rollout_ref.model.path={without_eos(task / 'base', tmp_path / 'endless')}"
    assert "no answer can end by itself (alarms.end_token): tokenizer" in plan(task, tmp_path / "run", capsys, model)
    assert "no answer can end" not in plan(task, tmp_path / "run", capsys, model, "actor_rollout_ref.rollout.ignore_eos=true")
    assert "no answer can end" not in plan(task, tmp_path / "run", capsys)


def test_host_memory_for_the_copy_of_a_checkpoint_is_planned(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as a run then writes; too many are reported."""
    saving = ("trainer.save_freq=1", "trainer.total_training_steps=1", "algorithm=ppo")
    output = plan(task, tmp_path / "plan", capsys, *saving)
    found = re.search(r"while one is written, its copy is in the host's memory: ([\d.e+-]+) GB on each node", output)
    assert found is not None and "training would wait" not in output
    run_ppo(task, tmp_path / "run", *saving)
    files = [*(tmp_path / "run/global_step_1").rglob("*.safetensors")]
    assert float(found[1]) * 1e9 == pytest.approx(sum(file.stat().st_size for file in files), rel=0.15), "headers are the rest"
    for quiet in ("trainer.save_freq=-1", "trainer.checkpoint.async_save=false"):
        assert "the host's memory" not in plan(task, tmp_path / "plan", capsys, *saving, quiet)
    monkeypatch.setattr(dry_run, "host_memory", lambda: Memory(1_100_000_000, 11_000_000_000, "machine"))
    assert "training would wait for each checkpoint to be written: copies of " in plan(task, tmp_path / "plan", capsys, *saving)


def test_host_memory_for_a_snapshot_of_the_weights_is_planned(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = (
        "algorithm=grpo", "placement=split", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "async_training.mode=async",
        "actor_rollout_ref.actor.use_kl_loss=false", "algorithm.rollout_correction.rollout_is=token",
    )  # fmt: skip
    output = plan(task, tmp_path / "plan", capsys, *ahead, "async_training.prox_logp=snapshot")
    found = re.search(r"in the host's memory: ([\d.e+-]+) GB on each of the actor's nodes", output)
    with safe_open(task / "base" / "model.safetensors", "pt") as weights:
        size = sum(weights.get_tensor(name).numel() * 4 for name in list(weights.keys()))
    assert found is not None and float(found[1]) * 1e9 == pytest.approx(size, rel=0.01)
    assert "in the host's memory" not in plan(task, tmp_path / "plan", capsys, *ahead)


def test_plan_states_what_the_run_would_do(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is started")

    monkeypatch.setattr(ppo_builder, "open_backend", started)
    words = ("trainer.total_training_steps=null", "trainer.total_epochs=5", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    output = plan(task, tmp_path / "run", capsys, *words, "algorithm=ppo", "reward.num_workers=2")
    with safe_open(task / "base" / "model.safetensors", "pt") as weights:
        names: list[str] = list(weights.keys())
        parameters = sum(weights.get_tensor(name).numel() for name in names)
    assert f"actor_rollout_ref.actor: {parameters / 1e6:.3g} million parameters (qwen2, {task}/base)" in output
    assert "data.train_files: 30 prompts of 30 rows" in output and "data.val_files: 8 prompts of 8 rows" in output
    assert "15 steps (5 epochs); 3 an epoch" in output, "30 prompts are 3 batches of 8"
    assert "a step: 8 prompts x 4 answers = 32 sequences" in output
    assert "actor: 2 updates a step, of 4 prompts = 16 sequences each" in output
    assert "workers (actor, critic, rollout): node 0, GPU 0" in output
    assert "rollout: 1 engine (embedded), each on 1 GPU" in output
    assert "starts anew" in output and "checkpoints: never (trainer.save_freq)" in output
    phases = re.findall(r"^  workers +(\S.*?)  +([\d.e+-]+) GB$", output, re.MULTILINE)
    assert [phase for phase, _ in phases] == [
        "answers", "actor: log-probs", "actor: update", "critic: values", "critic: update",
    ]  # fmt: skip
    assert all(0 < float(size) < 1 for _, size in phases), "a tiny model"
    assert "16 responses of at most 8 tokens" in output and "score of the ground truth as response: mean " in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_plan_of_an_existing_run_changes_nothing_in_it(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    output = plan(task, run_dir, capsys, *SAVED)
    actual = (run_dir / "config.yaml").read_text()
    assert "checkpoints: every 2 steps, after the last; all kept" in output
    steps = run_ppo(task, run_dir, *SAVED)
    assert len(steps) == 4 and (run_dir / "config.yaml").read_text() == actual
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    changes = ("trainer.total_training_steps=6", "actor_rollout_ref.actor.optim.total_training_steps=8")
    output = plan(task, run_dir, capsys, *SAVED, *changes)
    assert [line for line in output.splitlines() if line.startswith("note: would be resumed")] == [
        "note: would be resumed with another actor_rollout_ref.actor.optim.total_training_steps: -1 -> 8",
        "note: would be resumed with another trainer.total_training_steps: 4 -> 6",
    ]
    jump = "the schedule had 4 training steps and has 8: the learning rate of step 5 goes from 1e-05 to 5.5e-05"
    assert f"note: actor_rollout_ref.actor.optim: {jump}; actor_rollout_ref.actor.optim.total_training_steps=4 keeps" in output
    assert f"resumes from step 4: {run_dir}/global_step_4" in output and "6 steps (trainer.total_training_steps)" in output
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    written = after.keys() - before.keys()
    assert written == {run_dir / dry_run.DRY_RUN_CONFIG} and {path: after[path] for path in before} == before
    assert yaml.safe_load(after[run_dir / dry_run.DRY_RUN_CONFIG])["trainer"]["total_training_steps"] == 6
    other = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    message = refused(task, run_dir, capsys, *SAVED, *other)
    assert message.startswith("error: cannot resume with another configuration: ") and "data.train_batch_size: 8 -> 4" in message
    place = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir}/global_step_2")
    assert f"resumes from step 2: {run_dir}/global_step_2" in plan(task, tmp_path / "other", capsys, *SAVED, *place)
    weights = next((run_dir / "global_step_2" / "actor").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "trainer.resume_from_path: " in refused(task, tmp_path / "other", capsys, *SAVED, *place)


def test_plan_counts_dropped_prompts(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"data_source": "sort_digits", "reward_model": {"ground_truth": "1"}, "prompt": [{"role": "user", "content": "1="}]}
    rows = [row] * 9 + [row | {"prompt": [{"role": "user", "content": "1" * 99}]}] * 2
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    words = (f"data.train_files={tmp_path}/mixed.jsonl", "data.filter_overlong_prompts=true")
    output = plan(task, tmp_path / "run", capsys, *words, "trainer.total_training_steps=null", "trainer.total_epochs=1")
    assert "data.train_files: 9 prompts of 11 rows" in output and "1 step (1 epoch)" in output


def test_plan_works_on_a_machine_without_the_gpus(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ("trainer.backend=ray", "trainer.n_gpus_per_node=4", "trainer.device=cuda", "placement=split", "algorithm=ppo")
    sizes = ("trainer.n_gpus_per_node=3", "data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6")
    output = plan(task, tmp_path / "run", capsys, *words, *sizes)
    assert "trainer.n_gpus_per_node=3: this machine has 0 CUDA devices" in output
    assert "critic (critic): node 0, GPU 1" in output and "critic: fsdp, 1 rank, data parallel 1" in output
    assert "is a process" not in output
    adjacent = plan(task, tmp_path / "second", capsys, "trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.device=cuda")
    assert "rollout: 2 engines (embedded), each on 1 GPU" in adjacent
    assert "actor_rollout_ref.actor: fsdp, 2 ranks, data parallel 2" in adjacent
    monkeypatch.setattr("workers.roles.rollout_engines.find_spec", lambda name: name)
    engines = ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4")
    output = plan(task, tmp_path / "third", capsys, "trainer.backend=ray", "trainer.device=cuda", *engines)
    assert "rollout: 2 engines (vllm), each on 2 GPUs" in output and " of the GPU, and what stays resident" in output
    monkeypatch.setattr("workers.roles.rollout_engines.find_spec", lambda name: None)
    message = refused(task, tmp_path / "third", capsys, "trainer.backend=ray", "trainer.device=cuda", *engines)
    assert "actor_rollout_ref.rollout.name=vllm: vLLM is not installed here" in message


def test_plan_states_what_is_written_and_where(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies, answers = tmp_path / "copies", tmp_path / "answers"
    words = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.val_before_train=true", "trainer.max_actor_ckpt_to_keep=2")
    places = (f"trainer.checkpoint.remote_dir={copies}", f"trainer.rollout_data_dir={answers}")
    output = plan(task, tmp_path / "run", capsys, *words, *places)
    for line in (
        f"resumes from the newest whole checkpoint of {copies}, or starts anew",
        f"each step's answers: {answers}",
        "validation: before the first step, each step, after the last",
        "checkpoints: each step, after the last; the newest 2 kept",
        f"copies of them: {copies}",
    ):
        assert f"\n  {line}\n" in output, line
    far = "s3://bucket/run/global_step_4"
    words = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={far}", "reward.remote_urls=['http://127.0.0.1:9/']")
    output = plan(task, tmp_path / "run", capsys, *words, "reward.custom_reward_function.path=not_asked.py")
    assert f"\n  resumes from {far}, which is fetched first\n" in output
    assert "\n  validation: never (trainer.test_freq)\n" in output and not copies.exists() and not answers.exists()


def test_an_engine_over_gpus_that_do_not_divide_the_heads_is_refused(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM would refuse it when all workers have started."""
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=3"
    words = (size, "rollout=vllm", "trainer.backend=ray", "trainer.n_gpus_per_node=3", "trainer.dry_run=full")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *words)) == 2
    assert f"error: {size} does not divide the model's num_attention_heads=4" in capsys.readouterr().err


def test_tools_that_do_not_load_are_refused(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    (tmp_path / "broken.py").write_text("def f(:")
    conversations = (f"{turns}.enable=true", "trainer.dry_run=full")
    for word, message in (
        (f"{turns}.format=bogus", "format=bogus: no such format"),
        (f"{turns}.function_tool_path={tmp_path}/broken.py", "broken.py"),
    ):
        assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *conversations, word)) == 2
        assert message in capsys.readouterr().err
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *conversations)) == 0, capsys.readouterr().err


def test_plan_reports_problems_of_the_run(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(total=2e6)
    monkeypatch.setattr(dry_run.psutil, "virtual_memory", lambda: small)
    words = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64")
    positions = "actor_rollout_ref.model.override_config.max_position_embeddings=8"
    output = plan(task, tmp_path / "run", capsys, *words, positions).splitlines()
    assert "  actor_rollout_ref.actor.ppo_*: micro-batches of 64 tokens at most on a GPU" in output
    assert (
        output[-3].startswith("rows longer than the model knows: ") and " = 16 tokens, and its config.json has 8 " in output[-3]
    )
    assert output[-2] == "more than there is: actor: update in pool workers, and a worker here has 0.001 GB"
    assert output[-1].startswith("no training was started; ")
    small.total = 1e12
    stretched = "actor_rollout_ref.model.override_config.rope_parameters={rope_type:linear,factor:2.0,rope_theta:10000.0}"
    output = plan(task, tmp_path / "run", capsys, positions, stretched).splitlines()
    assert output[-1].startswith("fine, no training was started; ") and not output[-2].startswith("rows longer")


def test_plan_of_adapters_and_of_models_without_an_estimate(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = dry_run.measured(compose("ppo_trainer", PPOConfig, ppo_arguments(task, tmp_path / "run", "algorithm=ppo")))
    more = models["critic"].parameters - models["actor_rollout_ref.actor"].parameters
    assert more == 96 + 1, "weights and bias of the value head; the language head is tied"
    monkeypatch.setattr(dry_run, "shape_of", lambda *args: None)
    output = plan(task, tmp_path / "run", capsys, "algorithm=ppo", "actor_rollout_ref.model.lora_rank=2")
    assert "\n  none: it is for dense decoders, and actor_rollout_ref.actor, critic is none\na trial " in output
    assert (
        f"(qwen2, {task}/base; a LoRA adapter alone is trained)" in output
        and f"critic: 0.223 million parameters (qwen2, {task}/base)" in output
    )
    assert dry_run.in_millions(7_620_000_000) == "7.62 billion" and dry_run.in_millions(999_000) == "0.999 million"
