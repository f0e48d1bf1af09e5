"""Complete runs with reward models: their scores equal those of transformers, and the weighted sum equals the expected one."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.reward_models import make_reward_model, plain_scores, plain_token_scores, tokenizer_of
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from trainer import main_ppo
from trainer.ppo.batch_columns import named_rewards
from trainer.tracking.batch_file import load_batch
from workers.batch import Batch

TOLERANCE = 1e-5
MEAN, STD = 0.3, 0.7


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("sort_digits"))
    make_reward_model(folder / "same", seed=1, moments=(MEAN, STD))
    make_reward_model(folder / "other", seed=2, own_words=True)
    make_reward_model(folder / "tokens", seed=3, of_tokens=True)
    return folder


def batches(run_dir: Path) -> list[Batch]:
    """The dumped batches of all steps."""
    files = sorted((run_dir / "rollouts").glob("*.safetensors"))
    return [load_batch(file)[0] for file in files]


def run(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    return run_ppo(task, run_dir, f"trainer.rollout_data_dir={run_dir}/rollouts", *overrides)


def texts(run_dir: Path, step: int) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(run_dir / f"rollouts/step_{step}.parquet").to_pylist()
    return rows


def reported(batch: Batch, name: str) -> Tensor:
    return torch.tensor([extra[name] for extra in batch.objects["reward_extra"]], dtype=torch.float64)


def tokens_in_its_template(path: str, run_dir: Path, step: int) -> list[Tensor]:
    """Token ids of the conversations in the other model's template; a truncated one does not end."""
    tokenizer, rows = tokenizer_of(path), []
    for row in texts(run_dir, step):
        end = "<eos>" if row["finish_reason"] == "stop" else ""
        text = f"<user>{row['prompt']}<eos>\n<assistant>{row['response']}{end}"
        rows.append(torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rows


ON_MEGATRON = ("reward.reward_model.strategy=megatron",)
WORKERS = {
    "one worker": (),
    "one worker, the models on Megatron": ON_MEGATRON,
    "two workers of Ray's": ("trainer.backend=ray", "trainer.n_gpus_per_node=2"),
}


@pytest.mark.parametrize(
    "workers", [name if "Ray" not in name else pytest.param(name, marks=pytest.mark.soak) for name in WORKERS]
)
def test_reward_is_the_weighted_sum_of_two_models_and_a_rule(task: Path, tmp_path: Path, workers: str) -> None:
    models = (
        f"reward.models.same={{path: {task}/same, weight: 0.5, normalize: stored, clip: [-1, 1]}}",
        f"reward.models.other={{path: {task}/other, weight: -2, normalize: running}}",
        "reward.weight=0.25",
    )
    steps = run(task, tmp_path, *models, *WORKERS[workers], "trainer.test_freq=1", "trainer.val_before_train=true")
    seen = torch.zeros(0, dtype=torch.float64)
    for number, (batch, metrics) in enumerate(zip(batches(tmp_path), steps[1:], strict=True), start=1):
        finished = batch.rows["finished"].bool()
        assert len(batch) == 32 and finished.any() and not finished.all()
        same, other = reported(batch, "same"), reported(batch, "other")
        assert (same - plain_scores(f"{task}/same", batch.split_rows("input_ids"))).abs().max() < TOLERANCE
        assert (
            other - plain_scores(f"{task}/other", tokens_in_its_template(f"{task}/other", tmp_path, number))
        ).abs().max() < TOLERANCE
        seen = torch.cat([seen, other])
        clipped = ((same - MEAN) / STD).clamp(-1, 1)
        assert (clipped.abs() == 1).any() and (clipped.abs() < 1).any()
        by_hand = 0.25 * reported(batch, "acc") + 0.5 * clipped - 2 * (other - seen.mean()) / seen.std(correction=0)
        assert (batch.rows["score"] - by_hand).abs().max() < TOLERANCE
        assert torch.equal(batch.tokens["token_level_scores"][batch.offsets[1:] - 1], batch.rows["score"])
        assert metrics["reward/same/mean"] == pytest.approx(float(same.mean()), abs=TOLERANCE)
        assert metrics["reward/other/std"] == pytest.approx(float(other.std(correction=0)), abs=TOLERANCE)
        assert metrics["critic/score/mean"] == pytest.approx(float(by_hand.mean()), abs=TOLERANCE)
        assert metrics["reward/failed"] == 0.0 and metrics["timing_s/reward_model"] > 0
    assert {"val-aux/sort_digits/same/mean@1", "val-aux/sort_digits/other/mean@1"} <= steps[0].keys() & steps[2].keys()
    report = (tmp_path / "report.html").read_text()
    assert all(title in report for title in ("Scorer alone", "Reward models", "Reward models, held-out"))


def test_run_with_reward_models_resumes_bitwise(task: Path, tmp_path: Path) -> None:
    """Running moments of a model, a critic, greedy responses that the moments exclude, and filtered groups."""
    words = (
        f"reward.models.a={{path: {task}/same, normalize: running}}", "reward.weight=0", "trainer.save_freq=1",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "data.gen_batch_size=4",
        "trainer.resume_mode=auto",
    )  # fmt: skip
    whole = run_ppo(task, tmp_path / "whole", *words)
    run_ppo(task, tmp_path / "broken", *words, "trainer.total_training_steps=1")
    assert repeatable(run_ppo(task, tmp_path / "broken", *words)) == repeatable(whole)
    assert whole[0]["training/filter_groups/rounds"] > 1, "a step must have several rounds, with a weight sync after each"


def test_greedy_responses_are_scored_and_excluded_from_the_moments(task: Path, tmp_path: Path) -> None:
    model = f"reward.models.a={{path: {task}/same, normalize: running}}"
    run(task, tmp_path, model, "algorithm.adv_estimator=remax", "reward.weight=0")
    raw = [reported(batch, "a") for batch in batches(tmp_path)]
    seen = torch.cat(raw)
    last = batches(tmp_path)[-1]
    assert (last.rows["score"] - (raw[-1] - seen.mean()) / seen.std(correction=0)).abs().max() < TOLERANCE
    assert last.rows["baseline"].unique().numel() > 1


def test_estimators_of_separate_rewards_find_models_by_name(task: Path, tmp_path: Path) -> None:
    gdpo = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc,same]", "algorithm.gdpo_reward_weights=[0,1]")
    run(task, tmp_path, f"reward.models.same.path={task}/same", *gdpo, "trainer.total_training_steps=1")
    with pytest.raises(ValueError, match="the reward function reports no other for a response; it reports acc, same"):
        named_rewards(batches(tmp_path)[0].objects["reward_extra"], ["other"])


@pytest.mark.parametrize("mode", ["rollout", pytest.param("train", marks=pytest.mark.soak)])
def test_replay_uses_the_moments_of_the_step(task: Path, tmp_path: Path, mode: str) -> None:
    words = (f"reward.models.a={{path: {task}/same, normalize: running}}", "reward.weight=0.5", "trainer.save_freq=1")
    run(task, tmp_path, *words)
    again = (f"trainer.rollout_data_dir={tmp_path}/rollouts", f"trainer.replay.mode={mode}")
    path = f"trainer.replay.path={tmp_path}/rollouts/step_2.safetensors"
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path, *words, *again, path)) == 0


@pytest.mark.soak
def test_rule_of_weight_zero_is_measured_and_changes_nothing(task: Path, tmp_path: Path) -> None:
    (task / "more.py").write_text("def compute_score(**answer): return {'score': 100.0, 'acc': 0.5, 'length': 3}")
    measured = (f"reward.models.a.path={task}/same", "reward.weight=0")
    own = run(task, tmp_path / "own", *measured)
    other = run(task, tmp_path / "other", *measured, f"reward.custom_reward_function.path={task}/more.py")
    without = run(
        task, tmp_path / "without", *measured, "reward.custom_reward_function.path=null", "reward.scorer=none"
    )  # fmt: skip
    differ = {"reward/acc/mean", "reward/acc/std", "reward/length/mean", "reward/length/std"}
    for steps in zip(*map(repeatable, (own, other, without)), strict=True):
        first, *rest = ({name: value for name, value in step.items() if name not in differ} for step in steps)
        assert all(step == first for step in rest)
    assert [step["reward/acc/mean"] for step in other] == [0.5, 0.5] and "reward/acc/mean" not in without[0]


def test_run_without_rules_needs_only_prompts(task: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i:06d}="}) + "\n" for i in range(16)))
    data = (f"data.train_files={prompts}", f"data.val_files={prompts}", "trainer.test_freq=1")
    short_form = ("reward.reward_model.enable=true", f"reward.reward_model.model_path={task}/other")
    none = ("reward.custom_reward_function.path=null", "reward.scorer=none")
    steps = run(task, tmp_path / "run", *data, *short_form, *none)
    first = batches(tmp_path / "run")[0]
    plain = [
        torch.tensor(tokenizer_of(f"{task}/other")(row["prompt"] + row["response"])["input_ids"] + ends)
        for row in texts(tmp_path / "run", 1)
        for ends in ([1] if row["finish_reason"] == "stop" else [],)
    ]
    assert (reported(first, "reward_model") - plain_scores(f"{task}/other", plain)).abs().max() < TOLERANCE
    assert torch.equal(first.rows["score"].double(), reported(first, "reward_model").float().double())
    assert steps[-1]["val/accuracy"] == steps[-1]["val-core/prompts/reward/mean@1"]


def test_too_long_conversations_fail_or_are_truncated_and_are_counted(task: Path, tmp_path: Path) -> None:
    """A prompt has 7 tokens."""
    model = (f"reward.models.a={{path: {task}/same, max_length: 12}}", "trainer.total_training_steps=1")
    refused = run(task, tmp_path / "refused", *model)[0]
    kept = batches(tmp_path / "refused")[0]
    cut = run(task, tmp_path / "cut", *model, "reward.models.a.truncation=left")[0]
    whole = batches(tmp_path / "cut")[0]
    longer = whole.lengths > 12
    assert refused["reward/failed"] == longer.sum() > 0 and int(kept.lengths.max()) <= 12 and len(kept) == (~longer).sum()
    assert cut["reward/failed"] == 0 and cut["reward/a_cut/mean"] == float(longer.double().mean())
    plain = plain_scores(f"{task}/same", [row[-12:] for row in whole.split_rows("input_ids")])
    assert (reported(whole, "a") - plain).abs().max() < TOLERANCE


def test_token_rewards_are_added_per_token(task: Path, tmp_path: Path) -> None:
    models = (
        f"reward.models.steps={{path: {task}/tokens, weight: 0.5, kind: token, clip: [-0.2, 0.2]}}",
        f"reward.models.whole.path={task}/same",
    )
    run(task, tmp_path, *models, "algorithm=ppo")
    for batch in batches(tmp_path):
        rows, masks = batch.split_rows("input_ids"), batch.split_rows("response_mask")
        plain = [scores * mask for scores, mask in zip(plain_token_scores(f"{task}/tokens", rows), masks, strict=True)]
        sums = torch.stack([scores.sum() for scores in plain])  # up to 100: a float32 has steps of 1e-5 there
        assert ((reported(batch, "steps") - sums) / sums.abs().clamp(min=1.0)).abs().max() < TOLERANCE
        found = batch.split_rows("token_level_scores")
        rest = reported(batch, "acc") + reported(batch, "whole")
        for scores, given, of_whole in zip(plain, found, rest, strict=True):
            by_hand = 0.5 * scores.clamp(-0.2, 0.2).double()
            by_hand[-1] += of_whole
            assert (given - by_hand).abs().max() < TOLERANCE
        assert (torch.stack([given.sum() for given in found]) - batch.rows["score"]).abs().max() < TOLERANCE


REFUSED = {
    "no statistics": ("path: {task}/other, normalize: stored", "reward.models.a: normalize=stored: no reward_statistics.json"),
    "other words, token by token": ("path: {task}/other, kind: token", "reward.models.a: kind=token: the policy's tokens are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_reward_model_is_a_one_line_error(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fields, line = REFUSED[name]
    model = "reward.models.a={" + fields.format(task=task) + "}"
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", model)) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and line.format(task=task) in errors[0], errors
    assert not (tmp_path / "run/metrics.jsonl").exists() or metrics_of(tmp_path / "run") == []
