from pathlib import Path
import pytest
from safetensors.torch import load_file
import trainer.rollout.remote_rollout as remote_rollout
from tests.runs import make_task, run_ppo
from tests.trainer.ppo.test_replay import again
from tests.trainer.rollout.test_ahead_runs import AHEAD

@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("clock", ["logical", "wall"])
@pytest.mark.parametrize("mode", [("async_training.mode=async","async_training.max_staleness=3"), ("async_training.mode=one_step_off",)])
def test_x(backend, clock, mode, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(remote_rollout, "STEPS", 4)
    task = make_task(tmp_path / "task", train_size=16, sft_size=8)
    run_dir = tmp_path / "run"
    o = (*AHEAD, *mode, f"trainer.backend={backend}", f"trainer.rollout_data_dir={run_dir / 'rollouts'}", f"async_training.clock={clock}", "async_training.oversubmit=2.0")
    import time
    t=time.time()
    steps = run_ppo(task, run_dir, *o)
    print("TIME", time.time()-t)
    for s in steps:
        d = load_file(run_dir / "rollouts" / f"step_{s['training/global_step']:.0f}.safetensors")
        print({k: round(v,3) for k, v in s.items() if k in ("rollout/staleness/max","timing_s/gen","timing_s/rollout_idle","rollout/recomputed_tokens", "rollout/waiting_groups","rollout/unfinished_groups", "rollout/stale_tokens")}, d["tokens.weight_version"][d["tokens.response_mask"].bool()].unique(return_counts=True))
    for n in (2, 3,4, 5):
        r = again(task, run_dir, o, "train", n)
        out = capfd.readouterr()
        print(n, r, out.out[-3000:], out.err[-1500:])
    with capfd.disabled():
        print(out)
    assert 0
