"""Parts of a rival's driver that do not need the rival's environment."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.rivals import verl

TASK: dict[str, Any] = {
    "model": "/m", "train": "/t.parquet", "reward": "/r.py", "prompts": 4, "n": 2, "prompt_length": 17, "response_length": 60,
    "lengths": None, "lr": 1e-6, "kl_coef": 0.001, "steps": 3, "warmup": 1, "threads": 1, "ignore_eos": True,
    "device": "cpu",
}  # fmt: skip
UPDATE = {"kind": "update", "threads": 1, "dtypes": ["torch.float32"]}
ROLLOUT = {"kind": "rollout", "threads": 1, "dtypes": ["torch.float32"]}


def logged(ended: float, cpu: float) -> dict[str, float]:
    """Step in verl's log, with the metrics that the patches add."""
    tokens = {"bench/prompt_tokens": 136, "bench/response_tokens": 480}
    return {"bench/ended": ended, "bench/cpu": cpu, "timing_s/gen": 2.0, "timing_s/gen_cpu": 2.5, "timing_s/step": 7.0, **tokens}


def test_verl_step_lasts_from_the_previous_ones_end_and_counts_its_updates() -> None:
    notes = [{**UPDATE, "time": time} for time in (99.0, 104.0, 106.0, 111.0)] + [{**ROLLOUT, "time": 105.0}]
    assert verl.step_report(logged(100.0, 40.0), logged(110.0, 52.0), notes) == {
        "wall_s": 10.0,
        "cpu_s": 12.0,
        "prompt_tokens": 136,
        "response_tokens": 480,
        "updates": 2,
        "phases": {"gen": 2.0},
        "phases_cpu": {"gen": 2.5},
    }


def test_dtype_and_threads_are_those_of_trainer_and_engine() -> None:
    assert verl.had([UPDATE, ROLLOUT, UPDATE]) == {"dtype": "float32", "threads": 1}


@pytest.mark.parametrize(
    "notes",
    [
        [UPDATE],  # the engine never took weights
        [ROLLOUT],
        [UPDATE, {**ROLLOUT, "threads": 2}],
        [UPDATE, {**ROLLOUT, "dtypes": ["torch.bfloat16"]}],
        [{**UPDATE, "dtypes": ["torch.float32", "torch.bfloat16"]}, ROLLOUT],
    ],
)
def test_a_run_whose_parts_differ_is_refused(notes: list[dict[str, Any]]) -> None:
    with pytest.raises(SystemExit, match="trainer and engine must have the same threads and dtype"):
        verl.had(notes)


@pytest.mark.parametrize("there", [True, False])
def test_verl_settings_on_a_gpu_follow_the_installed_packages(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused log-probs without flash-attn would be computed token by token; vLLM would exit without FlashInfer."""
    monkeypatch.setattr(verl, "find_spec", lambda name: there or None)
    task = {**TASK, "device": "cuda"}
    options = dict(line.split("=", 1) for line in verl.settings(task, Path("/f")))
    model = "actor_rollout_ref.model"
    assert (options[f"{model}.use_remove_padding"], options[f"{model}.use_fused_kernels"]) == (str(there), str(not there))
    assert options[f"+{model}.override_config.attn_implementation"] == ("flash_attention_2" if there else "sdpa")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert verl.environment(task, Path("/f")).get("VLLM_USE_FLASHINFER_SAMPLER") == (None if there else "0")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in verl.environment(TASK, Path("/f"))


def test_a_task_without_warm_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.json").write_text(json.dumps({**TASK, "warmup": 0}))
    monkeypatch.setattr("sys.argv", ["verl.py", f"--task={tmp_path}/task.json", f"--out={tmp_path}/out.json"])
    with pytest.raises(SystemExit):
        verl.main()
    assert "warmup must be 1 or more" in capsys.readouterr().err


def test_run_waits_for_its_last_process(tmp_path: Path) -> None:
    """A process that outlives the driver, in a separate session as Ray's are, writes a file after half a second."""
    late = "setsid sh -c 'sleep 0.5; touch late' &"
    call = f"verl.run_to_the_end(['sh', '-c', {late!r}], {{}}, Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; from scripts.bench.rivals import verl; {call}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "late").exists()
