from itertools import pairwise
from pathlib import Path

import pytest

from data_preprocess import tiny_model
from scripts.bench.dispatch import REWARD, steps
from scripts.bench.suite import PARTS, ROOT, run_bench
from workers.batch import Batch


@pytest.mark.soak
@pytest.mark.alone
def test_quick_run_reports_controller_time_and_object_store_bytes() -> None:
    part = PARTS["dispatch"]
    report = run_bench(part, part.quick, ROOT)
    assert [(case["sequences"], case["workers"]) for case in report["steps"]] == [(128, 2), (1024, 2)]
    for case in report["steps"]:
        assert 60 * case["sequences"] < case["tokens"] < 100 * case["sequences"], "17 tokens, and 64 on average"
        parts = case["phases_s"]
        assert parts.keys() == {"gen", "reward", "ref", "adv", "update_actor", "sync", "rest"}
        assert all(-1e-3 < value < case["controller_s"] for value in parts.values()), parts
        assert 0 < case["controller_s"] < 5 and case["us_per_token"] < 100
    assert all(more["us_per_token"] < 3 * fewer["us_per_token"] for fewer, more in pairwise(report["steps"]))
    assert [case["replicas"] for case in report["turns"]] == [1, 2]
    assert all(case["turns"] > 50 and 0 < case["turn_ms"] < 20 for case in report["turns"])
    assert [case["replicas"] for case in report["turns_on_ray"]] == [1, 2]
    assert all(case["turns"] > 50 and 0 < case["least_ms"] <= case["cpu_ms"] < 20 for case in report["turns_on_ray"])
    store = report["store"]
    assert 8_000_000 < store["bytes"] < 9_000_000
    assert 1.0 <= store["stored_over_bytes"] < 1.02, "every byte is put into the store once"
    assert store["read_over_bytes"] == pytest.approx(1.0, abs=1e-3), "and read once"
    assert 0 < store["memcpy_s"] < store["seconds"]
    assert report["steps"][0]["controller_cpu_s"] > 0 and 0 < store["round_trip_ms"]["call"] < store["round_trip_ms"]["batch"]
    figures = {name: figure.of(report) for name, figure in part.figures.items()}
    assert figures["bytes into and out of the store, over the batch's"] < 2.02


@pytest.mark.parametrize("workers", [1, 2])
def test_controller_decodes_for_one_worker_and_several_decode_themselves(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def decode(answers: Batch, _: object) -> list[str]:
        calls.append(len(answers))
        return ["1"] * len(answers)

    monkeypatch.setattr("trainer.rollout.responses.decode_responses", decode)
    tiny_model.main([f"--save_dir={tmp_path / 'model'}"])
    (tmp_path / "reward.py").write_text(REWARD)
    assert steps(16, workers, 1, tmp_path)["sequences"] == 16
    assert calls == ([16, 16, 16] if workers == 1 else [])
