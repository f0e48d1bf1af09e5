"""Complete runs with the options that keep a run stable."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.runs import make_task, ppo_arguments, repeatable, run_ppo
from trainer import main_export, main_ppo

ACTOR = "actor_rollout_ref.actor"
ONE_STEP = ("trainer.total_training_steps=1",)
EMA = (f"{ACTOR}.ema_decay=0.75",)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def plain(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Two steps of the plain run: GRPO, vanilla, one update."""
    return run_ppo(task, tmp_path_factory.mktemp("plain"))


def ptx(task: Path) -> tuple[str, ...]:
    return (f"data.ptx_files={task}/sft.parquet", "data.ptx_max_length=32", f"{ACTOR}.ptx_coef=0.5", f"{ACTOR}.ptx_ratio=0.5")


def test_texts_change_the_gradient_and_not_the_metrics_of_the_policy(
    task: Path, tmp_path: Path, plain: list[dict[str, float]]
) -> None:
    steps = run_ppo(task, tmp_path, *ptx(task), "trainer.total_training_steps=3")
    first, other = repeatable(steps)[0], repeatable(plain)[0]
    assert first.pop("actor/ptx_loss") > 1 and first["actor/grad_norm"] > 1.5 * other["actor/grad_norm"]
    changed = {"actor/grad_norm", "actor/loss"}
    assert {name: value for name, value in first.items() if name not in changed} == pytest.approx(
        {name: value for name, value in other.items() if name not in changed}, rel=1e-5, abs=1e-7
    )
    losses = [step["actor/ptx_loss"] for step in steps]
    assert losses[2] < losses[1] < losses[0], "the loss of the texts falls"


@pytest.mark.filterwarnings(r"ignore:::megatron\.")
@pytest.mark.filterwarnings(r"ignore:`torch\.distributed:FutureWarning")
def test_texts_give_equal_steps_on_megatron_and_fsdp(task: Path, tmp_path: Path) -> None:
    steps = [
        run_ppo(task, tmp_path / strategy, *ptx(task), *ONE_STEP, f"{ACTOR}.strategy={strategy}")[0]
        for strategy in ("fsdp", "megatron")
    ]
    for name in ("actor/ptx_loss", "actor/grad_norm", "actor/loss", "actor/pg_loss"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-5)


def test_text_position_and_weight_average_resume_bitwise(task: Path, tmp_path: Path) -> None:
    overrides = (*ptx(task), *EMA, f"{ACTOR}.ppo_mini_batch_size=4", "trainer.save_freq=2", "trainer.total_training_steps=4")
    whole = run_ppo(task, tmp_path / "whole", *overrides)
    run_ppo(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=2")
    assert repeatable(run_ppo(task, tmp_path / "broken", *overrides)) == repeatable(whole)
    one, other = (load_file(*(tmp_path / name / "global_step_4/actor").glob("*.safetensors")) for name in ("whole", "broken"))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(name.startswith("optimizer.ema.") for name in one)


def test_weight_average_is_exported_as_a_model(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ppo(task, tmp_path / "run", *EMA, "trainer.save_freq=1")

    def weights(step: int, which: str) -> dict[str, torch.Tensor]:
        output = tmp_path / f"{which}_{step}"
        words = [f"checkpoint={tmp_path}/run/global_step_{step}", f"output={output}", f"which={which}"]
        assert main_export.PROGRAM(words) == 0
        return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).state_dict()

    began = AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32).state_dict()
    first, second, average = weights(1, "trained"), weights(2, "trained"), weights(2, "ema")
    for name, weight in average.items():
        expected = 0.75 * (0.75 * began[name] + 0.25 * first[name]) + 0.25 * second[name]
        torch.testing.assert_close(weight, expected, atol=1e-7, rtol=1e-5)
    assert any(not torch.equal(weight, second[name]) for name, weight in average.items())
    assert "weights, their moving average, in" in capfd.readouterr().out
    run_ppo(task, tmp_path / "without", *ONE_STEP, "trainer.save_freq=1")
    assert main_export.PROGRAM([f"checkpoint={tmp_path}/without", f"output={tmp_path}/none", "which=ema"]) == 2
    assert "has no moving average; a run with actor_rollout_ref.actor.ema_decay keeps the actor's" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.soak
def test_two_workers_have_the_texts_and_the_weight_average_of_one(task: Path, tmp_path: Path) -> None:
    overrides = (*ptx(task), *EMA, "trainer.save_freq=2")
    two = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
    runs = {name: run_ppo(task, tmp_path / name, *overrides, *more) for name, more in (("one", ()), ("two", two))}
    for name in ("actor/ptx_loss", "actor/grad_norm", "actor/pg_loss"):
        assert [step[name] for step in runs["two"]] == pytest.approx([step[name] for step in runs["one"]], rel=1e-4, abs=1e-6)
    averages = []
    for name in runs:
        assert main_export.PROGRAM([f"checkpoint={tmp_path / name}", f"output={tmp_path}/{name}_ema", "which=ema"]) == 0
        averages.append(load_file(tmp_path / f"{name}_ema/model.safetensors"))
    for name, weight in averages[0].items():
        torch.testing.assert_close(averages[1][name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.soak
def test_step_with_texts_is_replayed_bitwise(task: Path, tmp_path: Path) -> None:
    overrides = (*ptx(task), "trainer.save_freq=1", f"trainer.rollout_data_dir={tmp_path}/rollouts")
    run_ppo(task, tmp_path / "run", *overrides)
    asked = ("trainer.replay.mode=train", f"trainer.replay.path={tmp_path}/rollouts/step_2.safetensors")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *overrides, *asked)) == 0


def test_critic_starts_from_the_configured_reward_model(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sequence classifier has score.weight, which becomes the critic's head; an actor has none, so all values are 0."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(task / "base", num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "reward_model")
    ppo = ("algorithm=ppo", "trainer.save_freq=1", "critic.optim.lr=0.0", *ONE_STEP)
    step = run_ppo(task, tmp_path / "run", *ppo, f"critic.model.path={tmp_path}/reward_model")[0]
    message = capfd.readouterr().err
    assert "reward_model: Qwen2ForSequenceClassification; the critic begins with that model's own head" in message
    saved = load_file(*(tmp_path / "run/global_step_1/critic").glob("*.safetensors"))
    assert torch.equal(saved["model.score.weight"], model.score.weight) and not saved["model.score.bias"].any()
    assert step["critic/values/min"] < step["critic/values/max"]
    step = run_ppo(task, tmp_path / "new", *ppo)[0]
    assert "base: Qwen2ForCausalLM; the critic begins with a new head: its values are 0" in capfd.readouterr().err
    assert step["critic/values/min"] == step["critic/values/max"] == 0.0


def test_advantages_are_whitened_over_the_batch_or_the_group(task: Path, tmp_path: Path, plain: list[dict[str, float]]) -> None:
    raw = "algorithm.adv_estimator=reinforce"
    step = run_ppo(task, tmp_path / "batch", raw, "algorithm.whiten_advantages=batch", *ONE_STEP)[0]
    assert step["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-5)
    as_it_is = run_ppo(task, tmp_path / "raw", raw, *ONE_STEP)[0]
    assert as_it_is["critic/advantages/mean"] > 0.1 and step["critic/returns/mean"] == as_it_is["critic/returns/mean"]
    group = run_ppo(task, tmp_path / "group", raw, "algorithm.whiten_advantages=group", *ONE_STEP)[0]
    assert group["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-5)
    assert group["critic/advantages/max"] != step["critic/advantages/max"]


def test_kl_clip_limits_the_reward_penalty_and_is_reported(task: Path, tmp_path: Path) -> None:
    kl = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=1.0")
    whole, tight = (run_ppo(task, tmp_path / str(clip), *kl, f"algorithm.kl_clip={clip}")[1] for clip in (1e3, 1e-6))
    assert whole["actor/reward_kl_clipfrac"] == 0.0 and tight["actor/reward_kl_clipfrac"] > 0.9
    assert whole["actor/reward_kl_penalty"] == tight["actor/reward_kl_penalty"], "the metric is not clipped"
    assert abs(tight["critic/rewards/mean"] - tight["critic/score/mean"]) < 1e-3
    assert abs(whole["critic/rewards/mean"] - whole["critic/score/mean"]) > 1e-5


def test_truncated_responses_get_the_missing_eos_penalty(task: Path, tmp_path: Path, plain: list[dict[str, float]]) -> None:
    step = run_ppo(task, tmp_path, "reward.missing_eos_penalty=2.0", *ONE_STEP)[0]
    paid = step["critic/score/mean"] - step["critic/rewards/mean"]
    assert paid == pytest.approx(2.0 * step["response_length/clip_ratio"]) and paid > 0
    assert step["critic/score/mean"] == plain[0]["critic/score/mean"]
