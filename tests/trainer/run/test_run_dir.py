import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.full_disk import small_files
from trainer.run.run_dir import (
    GLOBAL_STEP,
    NON_FINITE,
    LineWriter,
    go_back,
    json_line,
    read_config,
    read_lines,
    read_metrics,
    redact,
    start_run,
    write_atomic,
)


def lay_out(run_dir: Path, steps: int, checkpoints: list[int]) -> None:
    """Write the files of a run."""
    run_dir.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        (run_dir / name).write_text("".join(json_line({GLOBAL_STEP: step, "loss": step / 3}) for step in range(1, steps + 1)))
    (run_dir / "rollouts").mkdir()
    for step in range(1, steps + 1):
        for kind in ("parquet", "safetensors"):
            (run_dir / f"rollouts/step_{step}.{kind}").write_bytes(b"rows")
    for step in checkpoints:
        (run_dir / f"global_step_{step}/actor").mkdir(parents=True)
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(checkpoints[-1]))
    (run_dir / "logs").mkdir()


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


@given(st.floats())
def test_floats_read_back_equal_bitwise(value: float) -> None:
    written = json.loads(json_line({"x": value}), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["x"]
    read = NON_FINITE[written] if isinstance(written, str) else written
    assert math.isnan(value) and math.isnan(read) if math.isnan(value) else struct.pack("d", read) == struct.pack("d", value)


def test_lines_that_failed_on_a_full_disk_are_written_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel's limit on a file's size cuts a line in the middle, as a full disk does."""
    lines = LineWriter(tmp_path / "lines")
    lines.write('{"a": 1}\n')
    with small_files(12):
        lines.write('{"a": 2}\n')
        lines.write('{"a": 3}\n')
    assert read_lines(tmp_path / "lines") == [{"a": 1}]
    lines.write('{"a": 4}\n')
    lines.close()
    assert read_lines(tmp_path / "lines") == [{"a": i} for i in (1, 2, 3, 4)]
    assert capsys.readouterr().err.count("File too large; what is not written waits for room") == 1


@pytest.mark.parametrize("before", ["", '{"a": 0}\n'])
def test_lines_that_found_no_room_to_the_end_are_cut_off(before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another writer begins a new line: the file stays readable, also if a kill left it torn."""
    path = tmp_path / "lines"
    path.write_text(before)
    lines = LineWriter(path)
    with small_files(len(before) + 4):
        lines.write('{"a": 1}\n')
        lines.close()
    assert path.read_text() == before and "lines: 5 bytes were not written" in capsys.readouterr().err
    path.write_text(f'{before}{{"a": ')
    lines = LineWriter(path)
    lines.write('{"a": 2}\n')
    lines.close()
    assert path.read_text() == f'{before}{{"a": 2}}\n'


def test_torn_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1, "x": "NaN"}\n{"training/global_step": 2, "x"')
    (entry,) = read_metrics(tmp_path)
    assert entry[GLOBAL_STEP] == 1 and math.isnan(entry["x"])


def test_last_line_without_newline_is_torn_even_if_valid(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"a": 2}')
    assert read_lines(tmp_path / "lines") == [{"a": 1}]


def test_invalid_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_lines(tmp_path / "lines")


def test_resume_truncates_everything_after_the_step(tmp_path: Path) -> None:
    lay_out(tmp_path, steps=7, checkpoints=[2, 4])
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"training/global_step": 8, "lo')
    for name in ("step_8.parquet.partial", "step_3.safetensors.partial"):
        (tmp_path / "rollouts" / name).write_bytes(b"ro")
    start_run(tmp_path, 4, None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(kept)
    assert (tmp_path / "samples.jsonl").read_bytes() == (tmp_path / "timeline.jsonl").read_bytes() == b"".join(kept)
    assert names(tmp_path / "rollouts") == {f"step_{step}.{kind}" for step in (1, 2, 3, 4) for kind in ("parquet", "safetensors")}
    assert {"global_step_2", "global_step_4", "logs"} < names(tmp_path)
    assert "earlier_1" not in names(tmp_path)


def test_resume_truncates_rollouts_in_another_directory(tmp_path: Path) -> None:
    lay_out(tmp_path / "run", steps=3, checkpoints=[2])
    (tmp_path / "dumps").mkdir()
    for name in ("step_2.parquet", "step_3.parquet", "step_notes.parquet", "other.txt"):
        (tmp_path / "dumps" / name).write_text("")
    start_run(tmp_path / "run", 2, tmp_path / "dumps")
    assert names(tmp_path / "dumps") == {"step_2.parquet", "step_notes.parquet", "other.txt"}


def test_resume_from_an_earlier_step_moves_later_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay_out(tmp_path, steps=7, checkpoints=[2, 4, 6])
    start_run(tmp_path, 2, None)
    assert names(tmp_path / "earlier_1") == {"global_step_4", "global_step_6"}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert "moved to earlier_1/" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"abc", b"\x8f"])
def test_a_record_of_the_best_that_is_not_whole_is_removed(content: bytes, tmp_path: Path) -> None:
    lay_out(tmp_path, steps=4, checkpoints=[2, 4])
    (tmp_path / "best_checkpointed_iteration.txt").write_bytes(content)
    go_back(tmp_path, 2, None)
    assert not (tmp_path / "best_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"a: [", b"\x8f"])
def test_a_configuration_that_is_not_whole_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.yaml: "):
        read_config(tmp_path)


def dumps_of(*steps: int) -> set[str]:
    return {f"step_{step}.{kind}" for step in steps for kind in ("parquet", "safetensors")}


def test_abandoned_steps_are_moved_into_one_directory(tmp_path: Path) -> None:
    run, dumps = tmp_path / "run", tmp_path / "dumps"
    lay_out(run, steps=7, checkpoints=[2, 4, 6])
    dumps.mkdir()
    for step in (2, 3):
        (dumps / f"step_{step}.parquet").write_bytes(b"rows")
    (run / "logs/nonfinite/step_6_actor").mkdir(parents=True)
    before = read_lines(run / "metrics.jsonl")
    best = run / "best_checkpointed_iteration.txt"
    best.write_text("6")
    aside = go_back(run, 4, dumps)
    assert not best.exists()
    assert aside == run / "earlier_1" and (run / "latest_checkpointed_iteration.txt").read_text() == "4"
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.jsonl"):
        assert read_lines(run / name) == before[:4] and read_lines(aside / name) == before[4:]
    assert names(run / "rollouts") == dumps_of(1, 2, 3, 4) and names(dumps) == {
        "step_2.parquet",
        "step_3.parquet",
    }
    assert names(aside / "rollouts") == dumps_of(5, 6, 7)
    assert {"global_step_6", "nonfinite"} < names(aside) and {"global_step_2", "global_step_4"} < names(run)
    assert "global_step_6" not in names(run)
    assert go_back(run, 2, dumps).name == "earlier_2" and names(dumps) == {"step_2.parquet"}


def test_new_run_moves_the_old_one_and_deletes_nothing(tmp_path: Path) -> None:
    lay_out(tmp_path, steps=3, checkpoints=[2])
    (tmp_path / "rollouts" / "step_4.parquet.partial").write_bytes(b"ro")
    start_run(tmp_path, None, None)
    assert names(tmp_path) == {"earlier_1", "logs"}
    assert len(read_metrics(tmp_path / "earlier_1")) == 3 and names(tmp_path / "earlier_1" / "rollouts") == dumps_of(1, 2, 3)
    (tmp_path / "metrics.jsonl").write_text("")
    start_run(tmp_path, None, None)
    assert names(tmp_path) == {"earlier_1", "earlier_2", "logs"}


def test_automatic_restart_keeps_the_events(tmp_path: Path) -> None:
    for resume_step in (None, 40):
        run_dir = tmp_path / str(resume_step)
        lay_out(run_dir, steps=3, checkpoints=[2])
        (run_dir / "events.jsonl").write_text('{"kind": "restart"}\n')
        start_run(run_dir, resume_step, None, restarted=True)
        assert names(run_dir) == {"earlier_1", "logs", "events.jsonl"}


def test_checkpoint_of_another_run_starts_a_new_run(tmp_path: Path) -> None:
    lay_out(tmp_path, steps=3, checkpoints=[2])
    start_run(tmp_path, 40, None)
    assert names(tmp_path) == {"earlier_1", "logs"}


def test_a_checkpoint_of_the_same_step_is_not_another_runs(tmp_path: Path) -> None:
    lay_out(tmp_path, steps=3, checkpoints=[2])
    start_run(tmp_path, 2, None, own=False)
    assert names(tmp_path) == {"earlier_1", "logs"} and "global_step_2" in names(tmp_path / "earlier_1")


def test_write_atomic_leaves_no_other_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "old")
    write_atomic(tmp_path / "file", "new: «ä»")
    assert names(tmp_path) == {"file"}
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new: «ä»"


def test_secrets_are_not_written() -> None:
    config = {
        "trainer": {"wandb": {"api_key": "s3cret"}, "max_tokens": 5, "hf-token": "s3cret"},
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "s3cret", "AWS_SECRET_ACCESS_KEY": "s3cret"}}}},
        "servers": [{"password": "s3cret", "url": "https://user:s3cret@host/path"}],
        "tokenizer_path": "gpt2",
        "loss_agg_mode": "token-mean",
        "ppo_max_token_len_per_gpu": 16384,
        "api_key": None,
    }
    redacted = redact(config)
    assert "s3cret" not in json.dumps(redacted)
    assert redacted["servers"][0] == {"password": "***", "url": "https://***@host/path"}
    for key in ("tokenizer_path", "loss_agg_mode", "ppo_max_token_len_per_gpu", "api_key"):
        assert redacted[key] == config[key]
    assert redacted["trainer"]["max_tokens"] == 5
