import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import RewardModelConfig, SFTConfig
from tests.trainer.checkpoints import CONFIG, is_complete, names, responses, save
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import Checkpoint, Damaged, read_checkpoint
from trainer.checkpoint.remote_copies import RemoteCopies
from trainer.checkpoint.resume import (
    SAFE_TO_CHANGE,
    _is_safe,
    _remove_leftovers,
    check_config,
    check_in_flight,
    complete_checkpoint,
    find_latest,
    find_up_to,
    resolve_resume,
)
from trainer.checkpoint.training_data import TrainingData
from trainer.run.run_dir import EVENTS, leaves_of, read_lines, start_run

ROOT = Path(__file__).parents[3]
LATEST = "latest_checkpointed_iteration.txt"


def resume(run_dir: Path, mode: str = "auto", path: Path | str | None = None) -> int | None:
    checkpoint = resolve_resume(mode, None if path is None else str(path), run_dir)
    return None if checkpoint is None else checkpoint.step


def test_search_up_to_a_step_returns_the_newest_valid_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    find = partial(find_up_to, tmp_path, check=lambda checkpoint: None)
    assert [found.step for found in map(find, (15, 14, 10, 9, 5)) if found] == [15, 10, 10, 5, 5]
    assert find(4) is None
    shutil.rmtree(tmp_path / "global_step_10" / "critic")
    found = find(14)
    assert (
        found is not None and found.step == 5 and "global_step_10: of actor, critic it has lost critic" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("groups", "taken", "what"),
    [(3, 0, "3 groups of responses in flight"), (0, 2, "2 prompts taken from a round of the data"), (0, 0, None)],
)
def test_what_is_in_flight_in_a_checkpoint_is_not_lost(groups: int, taken: int, what: str | None, tmp_path: Path) -> None:
    save(tmp_path, 2, arrays={"groups": {"now": torch.tensor([5]), "ordinal": torch.arange(groups)}})
    found = read_checkpoint(tmp_path / "global_step_2")
    found.manifest.state["data"] = {"drawn": 1} | ({"taken": taken} if taken else {})
    check_in_flight(found, continued=True, train_files=[])
    with (
        nullcontext()
        if what is None
        else pytest.raises(ValueError, match=f"global_step_2 has {what}, which this run would lose: ")
    ):
        check_in_flight(found, continued=False, train_files=[])


def test_responses_in_flight_to_prompts_of_other_data_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 2, arrays={"groups": {"now": torch.tensor([5]), "ordinal": torch.arange(3)}})
    found, file = read_checkpoint(tmp_path / "global_step_2"), tmp_path / "train.jsonl"
    file.write_text("1")
    found.manifest.state["training_data"] = TrainingData([str(file)]).state()
    check_in_flight(found, continued=True, train_files=[str(file)])
    file.write_text("2")
    with pytest.raises(ValueError, match=r"global_step_2 has 3 groups of responses in flight, to prompts of data\.train_files, "):
        check_in_flight(found, continued=True, train_files=[str(file)])


def test_rollback_skips_a_checkpoint_with_damaged_weights(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.step == 10:
            raise Damaged("bits fell over")

    found = find_up_to(tmp_path, 12, check)
    assert found is not None and found.step == 5


def test_controller_does_not_read_weights_that_workers_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and sizes are compared; all other files are hashed."""
    save(tmp_path, 5, arrays=responses(5))
    read: list[str] = []
    hashes_of = manifest.hashes_of
    monkeypatch.setattr(manifest, "hashes_of", lambda path, names: read.extend(names) or hashes_of(path, names))
    assert resolve_resume("auto", None, tmp_path, weights=False) is not None
    assert [name for name in read if name.endswith(".safetensors")] == ["flow/groups.safetensors"], "which no worker reads"
    shard = tmp_path / "global_step_5/actor/shard-0.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"no checkpoint up to step 5 is whole: .*shard-0.safetensors has "):
        resolve_resume("auto", None, tmp_path, weights=False)


def test_resume_mode_selects_the_checkpoint(tmp_path: Path) -> None:
    assert resume(tmp_path / "none_yet") is None
    save(tmp_path, 3, 7)
    assert resume(tmp_path) == 7
    assert resume(tmp_path, "disable") is None
    assert resume(tmp_path / "other", "resume_path", tmp_path / "global_step_3") == 3
    (tmp_path / LATEST).write_text("3\n")
    assert resume(tmp_path) == 3


def test_resume_errors_state_the_remedy(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(ValueError, match=r"needs trainer\.resume_from_path"):
        resolve_resume("resume_path", None, tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        resume(tmp_path, "resume_path", tmp_path / "global_step_4")
    with pytest.raises(ValueError, match="name one of those in it: global_step_3"):
        resume(tmp_path, "resume_path", tmp_path)
    (tmp_path / "elsewhere/global_step_5.incomplete").mkdir(parents=True)
    with pytest.raises(ValueError, match="never finished"):
        resume(tmp_path, "resume_path", tmp_path / "elsewhere/global_step_5.incomplete")
    (tmp_path / LATEST).write_text("4")
    with pytest.raises(ValueError, match=r"names step '4', but the checkpoints there are of steps \[3\]"):
        resume(tmp_path)


def test_interrupted_save_is_removed_at_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "global_step_6.incomplete/actor").mkdir(parents=True)
    (tmp_path / "global_step_3/critic.incomplete").mkdir()
    assert resume(tmp_path) == 3
    assert names(tmp_path) == {"global_step_3", LATEST}
    assert names(tmp_path / "global_step_3") == {"actor", "critic", "manifest.json"}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {
    "short": ("actor/shard-1.safetensors", cut_short, r"actor/shard-1.safetensors has 16 bytes, manifest.json says 17"),
    "bit": ("critic/shard-0.safetensors", one_bit, "critic/shard-0.safetensors is not what was written: its sha256"),
    "gone": ("actor/tokenizer.json", Path.unlink, "actor/tokenizer.json is not there"),
    "arrays": ("flow/groups.safetensors", one_bit, "flow/groups.safetensors is not what was written: its sha256"),
    "no arrays": ("flow/groups.safetensors", Path.unlink, "flow/groups.safetensors is not there"),
    "half a manifest": ("manifest.json", cut_short, "manifest.json is not whole: Invalid JSON"),
    "another file": ("manifest.json", lambda path: path.write_bytes(b"\x8f\x00"), "manifest.json is not whole: Invalid JSON"),
    "no manifest": ("manifest.json", Path.unlink, "no manifest.json in it"),
    "another shard": ("actor/x.safetensors", lambda path: path.write_text(""), "actor/x.safetensors is not of this checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_reported_and_the_previous_one_resumed(kind: str, tmp_path: Path) -> None:
    file, damage, output = DAMAGE[kind]
    save(tmp_path, 2, 4, 6, arrays=responses(6))
    damage(tmp_path / "global_step_6" / file)
    with pytest.raises(ValueError, match=output.replace("no manifest.json in it", "no manifest.json")):
        resume(tmp_path / "other", "resume_path", tmp_path / "global_step_6")
    checkpoint = find_latest(tmp_path)
    assert checkpoint is not None and checkpoint.step == 4 and is_complete(checkpoint.path, 4)
    (event,) = read_lines(tmp_path / EVENTS)
    assert (event["step"], event["kind"]) == (6, "damaged checkpoint")
    assert (
        re.search(output, event["text"])
        and "global_step_6" in event["text"]
        and event["text"].endswith("the one before it is taken")
    )
    start_run(tmp_path, checkpoint.step, None)
    assert names(tmp_path / "earlier_1") == {"global_step_6"} and resume(tmp_path) == 4


def test_run_without_a_complete_checkpoint_does_not_restart_silently(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    for step in (2, 4):
        cut_short(tmp_path / f"global_step_{step}/actor/shard-0.safetensors")
    with pytest.raises(
        ValueError, match=r"no checkpoint up to step 4 is whole: .*global_step_4: actor.*; .*global_step_2: actor"
    ):
        resume(tmp_path)


def test_callback_receives_the_problems_instead_of_stderr(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    one_bit(tmp_path / "global_step_4/actor/shard-0.safetensors")
    output: list[tuple[int, str]] = []
    checkpoint = find_latest(tmp_path, lambda step, text: output.append((step, text)))
    assert checkpoint is not None and checkpoint.step == 2 and output[0][0] == 4
    assert not (tmp_path / EVENTS).exists()


def test_damaged_arrays_are_found_by_every_reader_that_needs_them(tmp_path: Path) -> None:
    """A resume whose weights are hashed elsewhere, a rollback, a dry run; an export needs one role only."""
    save(tmp_path, 2, 4, arrays=responses(4))
    one_bit(tmp_path / "global_step_4/flow/groups.safetensors")
    found = [
        find_latest(tmp_path, weights=False),
        find_up_to(tmp_path, 4, lambda checkpoint: None),
        complete_checkpoint("auto", None, tmp_path),
    ]
    assert [checkpoint.step for checkpoint in found if checkpoint] == [2, 2, 2]
    assert read_checkpoint(tmp_path / "global_step_4", ["actor"]).step == 4


def test_checkpoint_without_a_role_is_skipped(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, actor=3, critic=1)
    with pytest.raises(ValueError, match=r"global_step_2: of actor, critic it has lost critic"):
        resume(tmp_path, "resume_path", tmp_path / "global_step_2")
    assert resume(tmp_path) == 3


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "actor/../../x"])
def test_manifest_path_outside_its_directory_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    manifest = json.loads((tmp_path / "global_step_2/manifest.json").read_text())
    manifest["files"][name] = {"size": 0, "sha256": ""}
    (tmp_path / "global_step_2/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"names {re.escape(repr(name))}, which is not inside the checkpoint"):
        resume(tmp_path)


def test_local_checkpoint_precedes_remote_copies(tmp_path: Path) -> None:
    save(tmp_path / "run", 2)
    save(tmp_path / "elsewhere", 8)
    checkpoint = resolve_resume("auto", None, tmp_path / "run", str(tmp_path / "elsewhere"))
    assert checkpoint is not None and checkpoint.step == 2
    checkpoint = resolve_resume("auto", None, tmp_path / "empty", str(tmp_path / "elsewhere"))
    assert checkpoint is not None and checkpoint.path == tmp_path / "empty/global_step_8"
    assert resolve_resume("disable", None, tmp_path / "third", str(tmp_path / "elsewhere")) is None


def test_run_resumes_from_an_address(tmp_path: Path) -> None:
    save(tmp_path / "run", 2, 4)
    checkpoint = resolve_resume("resume_path", f"file://{tmp_path}/run/global_step_2", tmp_path / "new")
    assert (
        checkpoint is not None and checkpoint.path == tmp_path / "new/fetched/global_step_2" and is_complete(checkpoint.path, 2)
    )
    with pytest.raises(ValueError, match=r"run/global_step_3: no manifest.json in it"):
        resolve_resume("resume_path", f"file://{tmp_path}/run/global_step_3", tmp_path / "new")


def test_address_with_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.checkpoint: nosuch://x: Protocol not known"):
        resolve_resume("disable", None, tmp_path, "nosuch://x")
    assert RemoteCopies(f"file://user:s3cret@{tmp_path}").name == f"file://***@{tmp_path}"


def changed(key: str, value: object) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    node = config
    *path, last = key.split(".")
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor_rollout_ref.actor.optim.lr", 2e-6, "actor_rollout_ref.actor.optim.lr: 1e-06 -> 2e-06"),
        ("data.train_files", ["b.parquet"], r'data.train_files: \["a.parquet"\] -> \["b.parquet"\]'),
        ("data.new_key", True, r"data.new_key: \(not set\) -> true"),
        ("data.train_batch_size", None, "data.train_batch_size: 32 -> null"),
    ],
)
def test_change_that_affects_training_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(CONFIG, changed(key, value))


def test_all_refused_changes_are_in_one_error() -> None:
    current = changed("data.train_batch_size", 64)
    current["actor_rollout_ref"]["actor"]["optim"]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"optim.lr.*train_batch_size"):
        check_config(CONFIG, current)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_epochs", 3),
        ("trainer.save_freq", -1),
        ("actor_rollout_ref.rollout.val_kwargs.n", 4),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2),
        ("ray_kwargs.ray_init.num_cpus", 4),
        ("reward.remote.batch_size", 8),
        ("reward.remote_urls", []),
        ("reward.models.helpful.urls", []),
    ],
)
def test_change_that_does_not_affect_training_is_reported(key: str, value: object) -> None:
    (output,) = check_config(CONFIG, changed(key, value))
    assert output.startswith(f"{key}: ") and output.endswith(f" -> {value}")


def test_critic_path_may_change_in_a_run_without_a_critic() -> None:
    """Its default was another model than the policy's."""

    def config(estimator: str, path: str) -> dict[str, Any]:
        return {"algorithm": {"adv_estimator": estimator}, "critic": {"enable": None, "model": {"path": path}}}

    assert check_config(config("grpo", "old"), config("grpo", "new")) == []
    with pytest.raises(ValueError, match=r"critic\.model\.path: \"old\" -> \"new\""):
        check_config(config("gae", "old"), config("gae", "new"))


def test_saved_list_equals_its_tuple_and_masked_secret_its_value(tmp_path: Path) -> None:
    current = changed("actor_rollout_ref.actor.optim.betas", (0.9, 0.999))
    assert check_config(changed("trainer.hf_token", "***"), current) == []


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return found


def test_safe_keys_exist_and_no_key_of_the_algorithm_is_among_them() -> None:
    """A misspelt entry would refuse a key that it is meant to allow; a loose pattern would allow too many keys."""
    trees = [yaml.safe_load((ROOT / "configs" / name).read_text()) for name in ("ppo_trainer.yaml", "sft_trainer.yaml")]
    keys = [key for tree in trees for key in leaves(tree)]
    for safe in SAFE_TO_CHANGE:
        pattern = re.escape(safe).replace(r"\*", ".*") + (".*" if safe.endswith(".") else "")
        assert [key for key in keys if re.fullmatch(pattern, key)], safe
    of_the_algorithm = re.compile(r"algorithm|optim\.|clip|loss|seed|mini_batch|epochs$|temperature|train_(files|batch)|path")
    allowed = {key for key in keys if _is_safe(key) and of_the_algorithm.search(key) and not key.startswith("alarms.")}
    assert allowed == {
        "trainer.total_epochs",
        *("actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps"),
        "optim.total_training_steps",  # trainer.checkpoint.resume.rate_changes reports a rate that jumps
        "trainer.resume_from_path",
        "trainer.replay.path",
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "algorithm.rollout_correction.mismatch_bound",
    }


@pytest.mark.parametrize(
    ("root", "schema"), [("ppo_trainer", PPOConfig), ("sft_trainer", SFTConfig), ("reward_model_trainer", RewardModelConfig)]
)
def test_checkpoint_of_an_earlier_version_is_resumed(root: str, schema: type) -> None:
    """The keys that it lacks have defaults of the earlier behaviour. keys_before_use_no_sync.txt: the keys of that version."""
    lines = (Path(__file__).parent / "keys_before_use_no_sync.txt").read_text().splitlines()
    known = {line.partition(" ")[2] for line in lines if line.startswith(f"{root} ")}
    config = asdict(compose(root, schema))
    saved = {key: value for key, value in leaves_of(config).items() if key in known}
    assert 0 < len(saved) < len(leaves_of(config))
    check_config(nested(saved), config)
    if schema is PPOConfig:
        with pytest.raises(ValueError, match=r"reward\.timeout_score: \(not set\) -> 0\.0"):
            check_config(nested(saved), asdict(compose(root, schema, ["reward.timeout_score=0"])))


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *above, name = key.split(".")
        place: Any = tree
        for part in above:
            place = place.setdefault(part, {})
        place[name] = json.loads(value)
    return tree


def test_placement_may_change_on_resume() -> None:
    """Checkpoints reshard."""
    assert all(_is_safe(key) for key in ("placement.layout", "placement.pools.train.fraction", "placement.roles.critic"))


def test_sharding_may_change_on_resume_and_dtype_may_not() -> None:
    trees = [asdict(compose("ppo_trainer", PPOConfig)), asdict(compose("sft_trainer", SFTConfig))]
    keys = {key for tree in trees for key in leaves(tree) if ".megatron." in key or key.endswith("strategy")}
    assert {key.rpartition(".")[2] for key in keys if not _is_safe(key)} == {"dtype", "override_transformer_config"}
    assert len(keys) == 5 * 12 and not _is_safe("critic.megatron.override_transformer_config.recompute_num_layers")
    assert not _is_safe("actor_rollout_ref.rollout.tensor_model_parallel_size"), "the rollout engine's log-probs would differ"


def test_interrupted_removal_of_a_checkpoint_is_finished_at_the_next_start(tmp_path: Path) -> None:
    for step, role in ((5, "actor.incomplete"), (6, "flow"), (7, "flow.incomplete"), (10, "actor")):
        (tmp_path / f"global_step_{step}" / role).mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "manifest.json").write_text("{}")
    _remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_10"]
