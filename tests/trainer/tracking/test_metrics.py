import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.run.timing import Phases
from trainer.tracking import metrics
from trainer.tracking.metrics import (
    data_metrics,
    gpu_names,
    idle_metrics,
    peak_flops,
    peak_flops_of,
    performance_metrics,
    reward_metrics,
    staleness_metrics,
    validation_metrics,
)
from workers.batch import Batch

LENGTHS = [5, 3, 8, 2]
PROMPTS = [2, 1, 4, 1]


def make_batch() -> Batch:
    """Four rows; the third response has an observation, and a sampled token that was rejected, the fourth is truncated."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    mask = torch.cat([(torch.arange(length) >= prompt).float() for length, prompt in zip(LENGTHS, PROMPTS, strict=True)])
    mask[5 + 3 + 5] = 0
    sampled = mask.clone()
    mask[5 + 3 + 7] = 0
    names = ("advantages", "returns", "values", "token_level_rewards", "old_log_probs", "rollout_log_probs")
    columns = {name: torch.randn(total, generator=generator) for name in names}
    return Batch(
        lengths=torch.tensor(LENGTHS),
        tokens=columns | {"response_mask": mask, "sampled_mask": sampled},
        rows={
            "score": torch.tensor([1.0, 0.0, 0.5, 0.0]),
            "finished": torch.tensor([1, 1, 1, 0]),
            "group": torch.tensor([7, 3, 7, 5]),
        },
    )


def trained(batch: Batch, name: str) -> list[float]:
    """Values of trained tokens, in plain Python."""
    return [float(v) for v, m in zip(batch.tokens[name], batch.tokens["response_mask"], strict=True) if m]


def test_metrics_of_a_step_equal_plain_python() -> None:
    batch = make_batch()
    found = data_metrics(batch, max_prompt_length=4)
    rewards = [float(row.double().sum()) for row in batch.split_rows("token_level_rewards")]
    expected = {
        "critic/score": [1.0, 0.0, 0.5, 0.0],
        "critic/rewards": rewards,
        "critic/advantages": trained(batch, "advantages"),
        "critic/returns": trained(batch, "returns"),
        "critic/values": trained(batch, "values"),
        "response_length": [3, 2, 3, 1],
        "prompt_length": PROMPTS,
    }
    for name, values in expected.items():
        assert found.pop(f"{name}/mean") == pytest.approx(statistics.fmean(values), rel=1e-6), name
        assert found.pop(f"{name}/max") == pytest.approx(max(values), rel=1e-6), name
        assert found.pop(f"{name}/min") == pytest.approx(min(values), rel=1e-6), name
    assert found.pop("response_length/clip_ratio") == 0.25
    assert found.pop("prompt_length/clip_ratio") == 0.25
    assert found.pop("training/zero_signal_groups") == 0.0
    errors = [r - v for r, v in zip(trained(batch, "returns"), trained(batch, "values"), strict=True)]
    explained = 1 - statistics.pvariance(errors) / (statistics.pvariance(trained(batch, "returns")) + 1e-5)
    assert found.pop("critic/vf_explained_var") == pytest.approx(explained)
    assert found == {}


def test_batch_without_a_critic_has_no_value_metrics() -> None:
    batch = make_batch()
    del batch.tokens["values"]
    assert not [name for name in data_metrics(batch, 4) if "values" in name or "vf_" in name]


def test_group_without_an_advantage_at_trained_tokens_has_no_signal() -> None:
    """Rows 0 and 2 are one group, 1 and 3 groups of one."""
    batch = make_batch()
    advantages = batch.tokens["advantages"]
    advantages[:8] = 0.0
    assert data_metrics(batch, 4)["training/zero_signal_groups"] == pytest.approx(1 / 3), "row 2 still has advantages"
    advantages[8:16] = torch.where(batch.tokens["response_mask"][8:16].bool(), 1e-17, 1.0)
    assert data_metrics(batch, 4)["training/zero_signal_groups"] == pytest.approx(2 / 3), (
        "rounding and masked tokens do not count"
    )


def test_metrics_do_not_depend_on_the_order_of_rows() -> None:
    batch = make_batch()
    mixed = batch.select([2, 0, 3, 1])
    for name, value in data_metrics(batch, 4).items():
        assert data_metrics(mixed, 4)[name] == pytest.approx(value, rel=1e-12), name


def batch_with_extras() -> Batch:
    batch = make_batch()
    batch.objects = {
        "data_source": ["openai/gsm8k", "math", "math", "math"],
        "reward_extra": [{"acc": 1.0, "overlong": 0.0}, {"acc": 0.0}, {"acc": 1.0}, {}],
    }
    return batch


def test_reported_number_is_a_mean_over_the_responses_that_have_it() -> None:
    found = reward_metrics(batch_with_extras(), {"math"})
    assert {name: value for name, value in found.items() if name.endswith("/mean")} == {
        "reward/acc/mean": pytest.approx(2 / 3),
        "reward/overlong/mean": 0.0,
    }
    assert (found["reward/acc/std"], found["reward/overlong/std"]) == (pytest.approx(2**0.5 / 3), 0.0) and len(found) == 4


def test_each_of_several_data_sources_has_its_own_metrics() -> None:
    """Also in a step with responses of only one of them."""
    sources = {"math", "openai/gsm8k"}
    found = reward_metrics(batch_with_extras(), sources)
    assert {name: value for name, value in found.items() if not name.startswith("reward/")} == {
        "critic/score/openai/gsm8k/mean": 1.0,
        "critic/score/math/mean": pytest.approx(0.5 / 3),
        "response_length/openai/gsm8k/clip_ratio": 0.0,
        "response_length/math/clip_ratio": pytest.approx(1 / 3),
    }
    assert reward_metrics(batch_with_extras().select([0]), sources)["critic/score/openai/gsm8k/mean"] == 1.0


def test_throughput_is_tokens_and_flops_over_gpu_seconds() -> None:
    seconds = {"gen": 2.0, "update_actor": 4.0, "step": 8.0, "testing": 3.0}
    batch = make_batch().with_meta({"generated_tokens": 20})
    found = performance_metrics(batch, seconds, 2, flops={"update_actor": 4e9}, peak=1e9)
    assert found == {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 8.0,
        "timing_s/testing": 3.0,
        "timing_per_token_ms/gen": 100.0,  # dropped responses included
        "timing_per_token_ms/update_actor": pytest.approx(4000 / 18),
        "perf/total_num_tokens": 18.0,
        "perf/time_per_step": 8.0,
        "perf/throughput": pytest.approx(18 / 16),
        "perf/mfu": 0.25,
        "perf/mfu/actor": 0.5,
    }


def test_role_on_a_part_of_the_gpus_is_measured_by_these_gpus() -> None:
    batch, seconds = make_batch().with_meta({"generated_tokens": 20}), {"update_actor": 4.0, "update_critic": 4.0, "step": 8.0}
    flops, gpus = {"update_actor": 4e9, "update_critic": 4e9}, {"update_actor": 1}
    found = performance_metrics(batch, seconds, 2, flops=flops, peak=1e9, gpus_of=gpus)
    assert (found["perf/mfu"], found["perf/mfu/actor"], found["perf/mfu/critic"]) == (0.5, 1.0, 0.5)


def test_unknown_gpu_has_no_mfu() -> None:
    found = performance_metrics(make_batch().with_meta({"generated_tokens": 10}), {"step": 1.0}, 1, flops={}, peak=None)
    assert not [name for name in found if "mfu" in name]


def test_validation_weighs_prompts_equally() -> None:
    found = validation_metrics(
        ["math", "math", "math", "math", "gsm8k", "gsm8k"], [7, 7, 8, 8, 9, 9], {"reward": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]}
    )
    assert found == {
        "val-core/gsm8k/reward/mean@2": 0.0,
        "val-core/math/reward/mean@2": 0.75,
        "val/accuracy": 0.5,
        "val/accuracy_std": pytest.approx((1 / 6) ** 0.5),
        "val/accuracy_min": 0.0,
        "val/partial_credit": 0.0,
        "val/problems": 3.0,
    }


def test_validation_uses_acc_if_the_reward_function_reports_it() -> None:
    found = validation_metrics(["math", "math"], [0, 1], {"reward": [0.3, 0.1], "acc": [1.0, 0.0]})
    assert found["val-core/math/acc/mean@1"] == found["val/accuracy"] == 0.5
    assert found["val-aux/math/reward/mean@1"] == pytest.approx(0.2)


def test_validation_metric_needs_a_value_for_every_response_of_its_source() -> None:
    found = validation_metrics(
        ["math", "math", "code"], [0, 1, 2], {"reward": [0.3, 0.1, 0.5], "acc": [1.0, 0.0, None], "format": [1.0, None, None]}
    )
    assert found == {
        "val-core/code/reward/mean@1": 0.5,
        "val-core/math/acc/mean@1": 0.5,
        "val-aux/math/reward/mean@1": pytest.approx(0.2),
        "val/accuracy": 0.5,
        "val/accuracy_std": pytest.approx((1 / 6) ** 0.5),
        "val/accuracy_min": 0.0,
        "val/partial_credit": pytest.approx(1 / 3),
        "val/problems": 3.0,
    }


def test_phases_sum_repeated_and_failed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 0.0, 10.0, 11.0, 20.0, 25.0, 30.0])  # created; step begins, gen 1 s, gen 5 s, step ends
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    phases = Phases()
    with pytest.raises(RuntimeError), phases("step"):
        with phases("gen"):
            pass
        with phases("gen"):
            raise RuntimeError
    assert phases.seconds == {"gen": 6.0, "step": 30.0}
    lengths = [(span.phase, pytest.approx(span.end - span.start, abs=1e-6)) for span in phases.spans]
    assert lengths == [("gen", 1.0), ("gen", 5.0), ("step", 30.0)]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2.5e15),
        ("Some GPU of tomorrow", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peak_flops_by_gpu_name(name: str, peak: float | None) -> None:
    assert peak_flops_of(name) == peak


def test_gpu_names_are_read_from_the_driver(tmp_path: Path) -> None:
    for bus in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n")
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    assert gpu_names(tmp_path / "none") == []


def test_cpu_peak_is_measured_once_with_one_thread() -> None:
    metrics._measured_cpu_flops.cache_clear()
    torch.set_num_threads(2)
    try:
        first = peak_flops("cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)  # as for every test
    assert first is not None and 1e8 < first < 1e13
    assert peak_flops("cpu") == first


def test_staleness_of_sampled_tokens_is_a_histogram_with_mean_and_maximum() -> None:
    """Step 9 trains on weights of version 8. Versions of prompts mean nothing."""
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    versions = torch.tensor([0, 8, 7, 5, 0, 8, 8], dtype=torch.int32)
    batch = Batch(torch.tensor([4, 3]), {"response_mask": mask, "weight_version": versions})
    found = staleness_metrics(batch, 9)
    assert found == {
        "rollout/staleness/0": 0.6, "rollout/staleness/1": 0.2, "rollout/staleness/3": 0.2,
        "rollout/staleness/mean": pytest.approx(0.8), "rollout/staleness/max": 3.0,
    }  # fmt: skip
    assert staleness_metrics(batch.with_tokens(response_mask=torch.zeros(7)), 9) == {}


def test_idle_time_of_each_pool_is_a_share_of_the_step() -> None:
    assert idle_metrics({"step": 8.0, "gen": 2.0}, 0.0) == {"perf/rollout_idle": 0.0, "perf/trainer_idle": 0.25}
    assert idle_metrics({"step": 8.0}, 6.0) == {"perf/rollout_idle": 0.75, "perf/trainer_idle": 0.0}
