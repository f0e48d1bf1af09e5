"""verl's command lines of generation ahead: pools, staleness, batches and lengths mean the same here, or are refused."""

from typing import Any

import pytest

from configs.argv import normalise, normalise_tree
from configs.base.keys import ConfigError, keys_of
from configs.compat.generation_ahead import generation_ahead
from configs.compose import compose, compose_with_notes
from configs.schema.placement import place
from configs.schema.ppo import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"


def translated(**given: Any) -> dict[str, Any]:
    """What keys, given with __ for dots, are replaced by."""
    values = {name.replace("__", "."): value for name, value in given.items()}
    return generation_ahead(values, values.get, keys_of(PPOConfig)).sets


def ppo(*typed: str) -> PPOConfig:
    return compose("ppo_trainer", PPOConfig, [*typed])


@pytest.mark.parametrize(
    ("trainer", "rollout", "cluster", "where"),
    [
        ((1, 6), (1, 2), (1, 8), ("node 0, GPUs 0-5", "node 0, GPUs 6-7")),
        ((2, 4), (2, 4), (2, 8), ("nodes 0-1, GPUs 0-3", "nodes 0-1, GPUs 4-7")),
        ((2, 8), (1, 8), (3, 8), ("nodes 0-1, GPUs 0-7", "node 2, GPUs 0-7")),
        ((1, 8), (1, 8), (2, 8), ("node 0, GPUs 0-7", "node 1, GPUs 0-7")),
    ],
)
@pytest.mark.parametrize("prefix", ["rollout", ROLLOUT])
def test_pools_of_trainer_and_engine_are_added(
    prefix: str, trainer: tuple[int, int], rollout: tuple[int, int], cluster: tuple[int, int], where: tuple[str, str]
) -> None:
    typed = [
        f"trainer.nnodes={trainer[0]}", f"trainer.n_gpus_per_node={trainer[1]}", f"{prefix}.nnodes={rollout[0]}",
        f"{prefix}.n_gpus_per_node={rollout[1]}", "actor_rollout_ref.hybrid_engine=False",
    ]  # fmt: skip
    config = ppo(*typed)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == cluster
    pools = place(config.placement, config.trainer, ("actor", "ref", "rollout")).pools
    assert [pool.in_words() for pool in pools] == [f"trainer (actor, ref): {where[0]}", f"rollout (rollout): {where[1]}"]
    line = normalise(typed, PPOConfig, "ppo_trainer")
    (note,) = line.notes
    assert note.startswith(f"{ROLLOUT}.nnodes, {ROLLOUT}.n_gpus_per_node, actor_rollout_ref.hybrid_engine: ")
    assert f"{cluster[0]} * {cluster[1]} GPUs, which placement.pools divides" in note


def test_engine_without_a_size_has_the_trainers_number_of_gpus_per_node() -> None:
    assert translated(actor_rollout_ref__rollout__nnodes=1, trainer__n_gpus_per_node=4)["placement.pools"] == {
        "trainer": {"nodes": 1, "gpus": 4, "fraction": 1.0},
        "rollout": {"nodes": 1, "gpus": 4, "fraction": 1.0},
    }


def test_hybrid_engine_false_alone_splits_the_gpus_unless_they_are_placed() -> None:
    assert ppo("actor_rollout_ref.hybrid_engine=false").placement.layout == "split"
    assert ppo("actor_rollout_ref.hybrid_engine=false", "placement=colocate_pairs").placement.layout == "colocate_pairs"
    assert ppo("actor_rollout_ref.hybrid_engine=true", f"{ROLLOUT}.nnodes=0").placement.layout == "colocate_all"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4", "trainer.n_gpus_per_node=6"),
            f"{ROLLOUT}.nnodes=1: 1 * 6 GPUs for the trainer, 1 * 4 for the engine: neither the same nodes with at most 8 GPUs",
        ),
        (
            ("recipe=quickstart", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"),
            f"{ROLLOUT}.nnodes=1: 1 * 8 GPUs for the trainer (type trainer.n_gpus_per_node if it is another number: a recipe's "
            "value is not read here), 1 * 1 for the engine: neither the same nodes",
        ),
        ((f"{ROLLOUT}.nnodes=1", "placement=split"), f"{ROLLOUT}.nnodes=1: placement places the roles too; leave one"),
        ((f"{ROLLOUT}.nnodes=1", "actor_rollout_ref.hybrid_engine=true"), f"{ROLLOUT}.nnodes=1: with actor_rollout_ref.hybrid"),
        ((f"{ROLLOUT}.nnodes=x",), f"{ROLLOUT}.nnodes=x: sizes of the pools must be numbers; set placement.layout=custom"),
        (("actor_rollout_ref.hybrid_engine=x",), "actor_rollout_ref.hybrid_engine=x: true, or false for placement.layout=split"),
        (
            ("async_training.staleness_threshold=2", "async_training.partial_rollout=False"),
            "async_training.staleness_threshold=2: with async_training.partial_rollout=false; responses continue with newer",
        ),
        (("async_training.staleness_threshold=-1",), "async_training.staleness_threshold=-1: must be a proportion of stale"),
        (
            ("async_training.require_batches=2", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "data.train_batch_size=128"),
            "async_training.require_batches=2: 2 * actor_rollout_ref.actor.ppo_mini_batch_size=32 are 64 prompts of a step, and "
            "data.train_batch_size=128; leave one out",
        ),
        (("async_training.require_batches=2",), "async_training.require_batches=2: set data.train_batch_size to the number of"),
        (
            ("data.train_batch_size=0",),
            "data.train_batch_size=0: set data.train_batch_size to the number of prompts that a step trains on",
        ),
        (
            ("rollout.total_rollout_steps=3", "data.train_batch_size=4"),
            f"{ROLLOUT}.total_rollout_steps=3: fewer prompts than a batch of 4 has; use at least 4",
        ),
        (("rollout.total_rollout_steps=100",), f"{ROLLOUT}.total_rollout_steps=100: set trainer.total_training_steps"),
        (("trainer.v1.separate_async.hybrid_rollout.enable_switch=true",), "trainer.v1.separate_async.hybrid_rollout.enable"),
        (("trainer.v1.separate_async.num_warmup_batches=3",), "trainer.v1.separate_async.num_warmup_batches=3: the first step"),
        (("trainer.v1.sampler.sync_refill_failed_groups=true",), "trainer.v1.sampler.sync_refill_failed_groups=true: responses"),
        (("trainer.v1.sampler.custom_sampler.path=my.py",), "trainer.v1.sampler.custom_sampler.path=my.py: data.shuf"),
    ],
)
def test_what_has_no_equivalent_is_refused_with_a_remedy(typed: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(*typed)
    (found,) = str(caught.value).splitlines()
    assert found.startswith(line)


@pytest.mark.parametrize("n", [1, 3, 4, 10])
@pytest.mark.parametrize("threshold", [0, 0.1, 0.25, 0.5, 1, 1.0, 2.5])
def test_staleness_threshold_bounds_groups_as_verls_rollouter_does(threshold: float, n: int) -> None:
    """Simulated: the rollouter fills its limit after each sync, and groups are trained on in the order of their admission."""
    size = 20
    limit = round((1 + threshold) * n * size)
    bound = translated(async_training__staleness_threshold=threshold, async_training__trigger_parameter_sync_step=n)[
        "async_training.max_staleness"
    ]
    # Versions of the groups that are not trained on yet, and how far they are from that of a step.
    queue, staleness = list[int](), 0
    for step in range(1, 60):
        version = (step - 1) // n * n
        if (step - 1) % n == 0:
            queue += [version] * (limit - len(queue))
        staleness = max([staleness, *(step - 1 - sampled_by for sampled_by in queue[:size])])
        del queue[:size]
    # Here the batch after a sync was generated before it: nothing fresher than n versions.
    assert bound == (max(staleness, n) if n > 1 else staleness)


def test_staleness_threshold_selects_the_mode_and_says_when_it_is_rounded() -> None:
    config, _, notes = compose_with_notes(
        "ppo_trainer", PPOConfig, ["async_training.staleness_threshold=0.5", "async_training.partial_rollout=True"]
    )
    assert (config.async_training.mode, config.async_training.max_staleness) == ("async", 1)
    assert any("(1 + 0.5) * 1 = 2 batches between two syncs, rounded up from 1.5" in note for note in notes)
    whole = ppo("async_training.staleness_threshold=1", "async_training.partial_rollout=False").async_training
    assert (whole.mode, whole.max_staleness) == ("async", 1)
    assert ppo("async_training.staleness_threshold=0").async_training.max_staleness == 0
    # Keys of this program win.
    own = ppo("async_training.staleness_threshold=3", "async_training.mode=one_step_off", "async_training.max_staleness=1")
    assert (own.async_training.mode, own.async_training.max_staleness) == ("one_step_off", 1)


def test_batches_and_lengths() -> None:
    config = ppo(
        "data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "rollout.total_rollout_steps=51200", "rollout.test_freq=10", "rollout.total_epochs=7",
    )  # fmt: skip
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (32, None)
    assert (config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.total_epochs) == (1600, 10, 7)
    found = translated(
        data__train_batch_size=0, actor_rollout_ref__actor__ppo_mini_batch_size=32, async_training__require_batches=4,
        async_training__trigger_parameter_sync_step=4, actor_rollout_ref__rollout__total_rollout_steps=51200,
        actor_rollout_ref__rollout__test_freq=2,
    )  # fmt: skip
    assert found == {"data.train_batch_size": 128, "trainer.total_training_steps": 400, "trainer.test_freq": 8}


def test_tests_of_verl_count_syncs_which_a_sweep_does_not_fix() -> None:
    words = ("actor_rollout_ref.rollout.test_freq=5", "async_training.mode=one_step_off")
    with pytest.raises(ConfigError, match=r"counts syncs, and async_training.trigger_parameter_sync_step is no number"):
        normalise([*words, "-m", "async_training.trigger_parameter_sync_step=1,2"], PPOConfig, "ppo_trainer")


def test_command_line_of_the_fully_async_program() -> None:
    config = ppo(
        "data.train_batch_size=0", "data.gen_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.hybrid_engine=False", "trainer.nnodes=1", "trainer.n_gpus_per_node=4", "rollout.nnodes=1",
        "rollout.n_gpus_per_node=4", "rollout.total_rollout_steps=51200", "async_training.staleness_threshold=0.1",
        "async_training.trigger_parameter_sync_step=4", "async_training.require_batches=4", "async_training.partial_rollout=True",
    )  # fmt: skip
    flight = config.async_training
    assert (flight.mode, flight.trigger_parameter_sync_step, flight.max_staleness) == ("async", 4, 4)
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (128, 400)
    assert ppo("async_training.require_batches=2", "actor_rollout_ref.actor.ppo_mini_batch_size=32").data.train_batch_size == 64


@pytest.mark.parametrize(
    ("typed", "note"),
    [
        ("async_training.use_trainer_do_validate=True", "async_training.use_trainer_do_validate is left out: validation runs on"),
        ("async_training.checkpoint_engine.enable=True", "async_training.checkpoint_engine.enable is left out: weights are sent"),
        ("trainer.v1.sampler.max_off_policy_strategy=drop", "trainer.v1.sampler.max_off_policy_strategy is left out: groups"),
    ],
)
def test_keys_without_effect_on_results_are_left_out_with_a_note(typed: str, note: str) -> None:
    (found,) = normalise([typed], PPOConfig, "ppo_trainer").notes
    assert found.startswith(note)


@pytest.mark.parametrize(("value", "bypass"), [("true", False), ("false", True)])
def test_proximal_log_probs_of_verl_are_the_actors_or_the_rollouts(value: str, bypass: bool) -> None:
    assert ppo(f"async_training.compute_prox_log_prob={value}").algorithm.rollout_correction.bypass_mode == bypass


def test_yaml_is_translated_like_a_command_line() -> None:
    native: dict[str, Any] = {"mode": None, "max_staleness": 2}
    given = {
        "async_training": native | {"staleness_threshold": 1, "partial_rollout": True},
        "rollout": {"nnodes": 1, "n_gpus_per_node": 2, "total_rollout_steps": 640},
        "data": {"train_batch_size": 0, "gen_batch_size": 1},
        "actor_rollout_ref": {"hybrid_engine": False, "actor": {"ppo_mini_batch_size": 64}},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 6},
        "placement": {"layout": "colocate_all", "pools": {}},
    }
    tree, notes = normalise_tree(given, PPOConfig)
    assert tree["async_training"] == {"mode": "async", "max_staleness": 1} and len(notes) == 4
    assert tree["trainer"] == {"nnodes": 1, "n_gpus_per_node": 8, "total_training_steps": 10}
    assert tree["placement"]["layout"] == "custom" and tree["placement"]["pools"]["rollout"]["gpus"] == 2
    assert tree["data"] == {"train_batch_size": 64}
    # Its own placement, or the command line's, is not overwritten.
    own = given | {"placement": {"layout": "split", "pools": {}}}
    with pytest.raises(ConfigError, match=r"placement\.layout places the roles too"):
        normalise_tree(own, PPOConfig)
