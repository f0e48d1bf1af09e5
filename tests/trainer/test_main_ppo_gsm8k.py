"""recipe=gsm8k_0.5b from raw rows of GSM8K to a learned model, with a tiny Qwen2 that reads and writes digits only."""

import json
from pathlib import Path

import pytest

from data_preprocess import gsm8k, tiny_model
from tests.runs import metrics_of
from trainer import main_ppo

# From GSM8K's training set (Cobbe et al. 2021, arXiv:2110.14168, MIT licence): problems with a one-digit answer.
ROWS = [
    {
        "question": "Twice Angie's age, plus 4, is 20. How old is Angie?",
        "answer": "Twice Angie's age is 20-4=<<20-4=16>>16.\nAngie is 16/2=<<16/2=8>>8.\n#### 8",
    },
    {
        "question": "Six bottles of 2 liters of water cost $12. What is the price of 1 liter of water?",
        "answer": "Each bottle of 2 liters of water costs $12/6 = $<<12/6=2>>2.\n"
        "So the cost of 1 liter of water is $2/2 = $<<2/2=1>>1.\n#### 1",
    },
    {
        "question": "If it takes 20 minutes to paint a house, how many houses can you paint in 3 hours?",
        "answer": "There are 3 hours * 60 minutes/hour =<<3*60=180>>180 minutes in 3 hours\n"
        "You can paint 180 minutes / 20 houses/minute = 9 houses in 3 hours.\n#### 9",
    },
    {
        "question": "James buys 2 notebooks with 50 pages each.  He pays $5.  How many cents did each page cost?",
        "answer": "He bought 2*50=<<2*50=100>>100 pages\nIt cost 5*100=<<5*100=500>>500 cents\n"
        "So he spent 500/100=<<500/100=5>>5 cents per page\n#### 5",
    },
]


@pytest.mark.parametrize("overrides", [(), pytest.param(("algorithm=ppo",), marks=pytest.mark.soak)], ids=["grpo", "ppo"])
def test_recipe_learns(overrides: tuple[str, ...], tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    gsm8k.main([f"--local_dataset_path={tmp_path}", f"--local_save_dir={tmp_path}"])
    tiny_model.main([f"--save_dir={tmp_path / 'model'}", "--alphabet=0123456789"])
    arguments = [
        "recipe=gsm8k_0.5b", *overrides, "trainer.device=cpu", "trainer.backend=local", "trainer.logger=[]",
        f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model", f"critic.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=20", "trainer.save_freq=-1",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_response_length=1",
        "reward.gsm8k.method=flexible",  # it cannot write ####
        "actor_rollout_ref.actor.optim.lr=3e-3",
    ]  # fmt: skip
    assert main_ppo.PROGRAM(arguments) == 0
    before, first, *_, last = metrics_of(tmp_path / "run")
    assert before["val/problems"] == len(ROWS) and first["response_length/max"] == 1
    assert first["critic/score/mean"] < 0.3 and last["critic/score/mean"] > 0.6
    assert last["actor/skipped_updates"] == 0
    assert ("actor/kl_loss" in last, "critic/vf_loss" in last) == (not overrides, bool(overrides))
