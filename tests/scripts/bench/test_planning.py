"""Tables of predictions against measurements."""

import json
from pathlib import Path

import pytest

from scripts.bench import planning
from scripts.bench.planning import backtest_table, compared, fit_table, order, predict
from scripts.bench.step import arguments, make_task
from trainer.planner.hardware import load_hardware


def test_sleep_counts_to_the_sync_wherever_the_timeline_has_it() -> None:
    forecast = {"times": {"answers": {"decode": 2.0}, "actor: update": {"products": 1.0, "optimizer": 0.5}}, "step": 4.0}
    measured = {"gen": 2.5, "update_actor": 2.0, "sync": 0.1, "engine_sleep": 0.4, "step": 5.0}
    columns = compared(measured, forecast)["columns"]
    assert columns["generation"] == (2.5, 2.0) and columns["update"] == (1.6, 1.5)
    assert columns["sync"] == (0.5, 0.0) and columns["step"] == (5.0, 4.0)
    with_forward = compared(measured | {"ref": 1.0}, forecast)["columns"]
    assert with_forward["forward"] == (0.6, 0.0) and with_forward["update"] == (2.0, 1.5)


def test_order_leaves_out_pairs_that_are_measured_equal() -> None:
    assert order([(1.0, 1.0), (2.0, 3.0), (4.0, 2.0)]) == ((2, 3), pytest.approx(1 / 3))
    assert order([(1.0, 2.0), (1.04, 1.0)]) == ((0, 0), 1.0)


def test_table_has_errors_and_their_medians() -> None:
    columns = {"generation": (2.0, 1.0), "forward": (0.0, 0.0), "update": (1.0, 1.1), "sync": (0.5, 0.5), "step": (4.0, 3.0)}
    text = backtest_table([{"row": "a", "shape": "7b", "card": "1 x NVIDIA H200", "columns": columns}])
    assert "| a: 7b, 1 x H200 | 2, 1 (-50%) |  | 1, 1.1 (+10%) | 0.5, 0.5 (+0%) | 4, 3 (-25%) |" in text
    assert "| median error | 50% |  | 10% | 0% | 25% |" in text


def test_second_order_is_of_layouts_alone() -> None:
    steps = {"a": (1.0, 1.0), "b": (2.0, 2.0), "two-runs": (3.0, 0.5)}
    rows = [
        {"row": name, "shape": "7b", "card": "", "columns": dict.fromkeys((*planning.PHASES, "step"), pair)}
        for name, pair in steps.items()
    ]
    lines = backtest_table(rows).splitlines()
    assert "3 rows. Of 3 pairs" in lines[-3] and "1 are in the measured order" in lines[-3]
    assert lines[-1].endswith("Of 1 pairs of steps that differ by more than 5 %, 1 are in the measured order (Kendall tau 1.00).")


def test_rows_are_predicted_with_the_defaults_and_costs_of_their_date(tmp_path: Path) -> None:
    row, now = planning.BY_NAME["quick-grpo"], load_hardware("h200").software
    found = {}
    for date in ("2026-11-24", "2026-11-28 04:07", "2026-11-28 14:42"):
        then, hardware = planning.as_of(date, row, "h200", tmp_path)
        costs = load_hardware(hardware).software
        found[date] = (then.overrides != row.overrides, costs.sleep > now.sleep, costs.decode > now.decode)
    assert [*found.values()] == [(True, True, True), (False, False, True), (False, False, False)]


def test_measured_layouts_are_read_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "run_tandem", lambda *args: pytest.fail("was measured"))
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"name": "tiny, one worker", "cpu_s": 1.5, "wall_s": 2.0}) + "\n")
    found = planning.layout("tiny, one worker", load_hardware("cpu"), records)
    assert found["cpu"][0] == 1.5 and found["wall"][0] == 2.0 and found["cpu"][1] > 0


def test_cpu_seconds_are_those_of_all_workers(tmp_path: Path) -> None:
    work = planning.TINY
    words = arguments(work, make_task(work, tmp_path, seed=0), tmp_path / "run")
    hardware = load_hardware("cpu")
    one, two = predict(words, work, hardware), predict([*words, *planning.TWO], work, hardware)
    assert one["cpu"] == pytest.approx(one["step"])
    assert two["step"] < one["step"] < two["cpu"] < 2 * two["step"] * 1.001


def test_published_runs_have_a_source_and_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads((planning.ROOT / "scripts" / "bench" / "published.json").read_text())
    assert all(row["source"] and row["date"] and row["measured"] for row in rows)
    planning.main(["published", "--only", "prime-rl, Qwen3-4B, rows of 16,384", "DeepSeek"])
    out = capsys.readouterr().out
    # 4.69 s with a trainer of the same design (FSDP2, recomputation): the model is within 15 %.
    seconds = float(out.split("| 4.69, ")[1].split(" ")[0])
    assert abs(seconds / 4.69 - 1) < 0.15
    assert "DeepSeek-V3, 256 x H100 |  |  |  | 154, " in out


def test_fit_finds_the_costs_that_rows_were_made_with() -> None:
    rows = []
    for i, (batch, update, calls) in enumerate(((4, 1, 8), (20, 4, 32), (12, 2, 16), (40, 8, 8))):
        # Predicted with 16, 100 and 40 ms, measured with 32, 60 and 20.
        times = {
            "answers": {"decode": 3.0, "calls": 0.04 * calls}, "ref: log-probs": {"products": 1.0},
            "actor: update": {"products": 2.0, "batches": 0.016 * batch, "update": 0.1 * update},
        }  # fmt: skip
        generation, update_ = 3.0 + 0.02 * calls, 2.0 + 0.032 * batch + 0.06 * update
        predicted = [sum(parts.values()) for parts in times.values()]
        columns = {
            "generation": (generation, predicted[0]), "forward": (1.0, 1.0), "update": (update_, predicted[2]),
            "step": (generation + 1.0 + update_, sum(predicted)),
        }  # fmt: skip
        rows.append({"row": f"kind{i}-a", "columns": columns, "times": times})
    text = fit_table(rows, load_hardware("h200"))
    assert text.splitlines()[0] == "all rows: batch 32 ms, update 60 ms, turn 20 ms"
    assert "without kind1: batch 32 ms, update 60 ms, turn 20 ms; its steps: " in text
    assert text.splitlines()[-1] == "median error of the rows left out: 0%"
