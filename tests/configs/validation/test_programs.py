"""Invalid combinations of keys: errors with the arithmetic, and notes."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig
from configs.validation.programs import check_generation, check_ppo, check_sft

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
FILTER, OVERLONG = "algorithm.filter_groups", "reward.reward_kwargs.overlong_buffer_cfg"
CORRECTION = "algorithm.rollout_correction"
AHEAD = (
    "algorithm=grpo",
    f"{ROLLOUT}.n=2",
    "placement=split",
    "async_training.mode=async",
    "algorithm.rollout_correction.rollout_is=token",
)
WORKERS = "8 workers (trainer.nnodes * trainer.n_gpus_per_node = 1 * 8)"
TOO_SMALL = "a micro-batch of {} tokens cannot hold the longest row"
LONGEST = "data.max_prompt_length + data.max_response_length = 512 + 512 = 1024"


def ppo_lines(*overrides: str, needs_values: bool = True) -> list[str]:
    """Errors, or the notes if there are none."""
    config = compose("ppo_trainer", PPOConfig, overrides)
    typed = {override.partition("=")[0] for override in overrides}
    try:
        return check_ppo(config, typed, needs_values=needs_values)
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def sft_lines(*overrides: str) -> list[str]:
    try:
        return check_sft(compose("sft_trainer", SFTConfig, overrides), ())
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def test_a_judge_needs_url_model_and_a_timeout_below_the_rewards() -> None:
    assert ppo_lines("reward.scorer=judge") == [
        f"error: reward.scorer=judge: reward.judge.{name} is null; set the URL of an OpenAI-compatible server and its model"
        for name in ("url", "model")
    ]
    there = ("reward.scorer=judge", "reward.judge.url=http://judge/v1", "reward.judge.model=large")
    assert ppo_lines(*there) == []
    assert ppo_lines(*there, "reward.judge.timeout=9", "reward.judge.retries=3") == [
        "error: reward.timeout=30: less than the judge's maximum time, (retries + 1) * timeout + pauses = 4 * 9 + 7 = 43 s "
        "(reward.judge.retries, timeout, backoff)"
    ]


def test_a_column_of_tools_needs_one_of_conversations() -> None:
    (line,) = sft_lines("data.tools_key=tools")
    assert line == "error: data.tools_key=tools: only conversations have tools; set data.messages_key"
    assert sft_lines("data.tools_key=tools", "data.messages_key=messages") == []


def test_a_scorer_with_a_custom_function_has_no_effect() -> None:
    lines = ppo_lines("reward.scorer=math", "reward.custom_reward_function.path=rewards.py")
    assert lines == ["reward.scorer=math has no effect: reward.custom_reward_function computes the scores"]


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        ("null", []), ("partial", ["max_age", "oversubmit"]), ("one_step_off", []), ("async", ["max_staleness", "oversubmit"]),
    ],
)  # fmt: skip
def test_bounds_of_another_way_to_generate_are_reported(mode: str, used: list[str]) -> None:
    typed = {"max_staleness": "2", "max_age": "3", "oversubmit": "2"}
    words = [*AHEAD, "trainer.n_gpus_per_node=9", f"async_training.mode={mode}"]
    unused = [f"async_training.{name} has no effect: async_training.mode={mode}" for name in typed if name not in used]
    notes = ppo_lines(*words, *(f"async_training.{name}={value}" for name, value in typed.items()), needs_values=False)
    assert [note for note in notes if "has no effect: async_training.mode" in note] == unused
    assert not any("has no effect" in note for note in ppo_lines(*words, needs_values=False)), "keys that were not typed"


def test_max_staleness_bounds_the_steps_between_syncs_of_one_step_off() -> None:
    words = [
        *AHEAD,
        "trainer.n_gpus_per_node=9",
        "async_training.mode=one_step_off",
        "async_training.trigger_parameter_sync_step=2",
    ]
    notes = ppo_lines(*words, "async_training.max_staleness=2", needs_values=False)
    assert not any(note.startswith(("error: ", "async_training.max_staleness")) for note in notes)
    (line,) = ppo_lines(*words, "async_training.max_staleness=1", needs_values=False)
    assert line.startswith("error: async_training.trigger_parameter_sync_step=2: ")


def test_defaults_and_quick_start_have_no_errors_or_notes() -> None:
    assert ppo_lines() == []
    assert ppo_lines("recipe=quickstart", needs_values=False) == []
    assert ppo_lines("recipe=quickstart", "algorithm=ppo") == []
    assert sft_lines() == []


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=32"],
            [
                f"{ACTOR}.ppo_mini_batch_size=32: data.train_batch_size=100 is not a multiple of it (100 = 3 * 32 + 4); "
                "use for example 25"
            ],
        ),
        (
            ["data.train_batch_size=17", f"{ACTOR}.ppo_mini_batch_size=16"],
            [
                f"{ACTOR}.ppo_mini_batch_size=16: data.train_batch_size=17 is not a multiple of it (17 = 1 * 16 + 1); use "
                "for example 17"
            ],
        ),
        (
            ["critic.ppo_mini_batch_size=300"],
            [
                "critic.ppo_mini_batch_size=300: data.train_batch_size=1024 is not a multiple of it (1024 = 3 * 300 + 124); "
                "use for example 256"
            ],
        ),
        (
            ["data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=3"],
            [
                f"data.train_batch_size=2: data.train_batch_size * {ROLLOUT}.n = 2 * 3 = 6 sequences per step "
                f"are fewer than {WORKERS}; increase it"
            ],
        ),
        (
            ["data.train_max_samples=1000"],
            ["data.train_max_samples=1000: less than one batch, data.train_batch_size=1024; increase it (-1 = all rows)"],
        ),
        (
            [f"{ROLLOUT}.max_model_len=1"],
            [f"{ROLLOUT}.max_model_len=1: no room for a prompt and a response; increase it, or use null"],
        ),
        (
            [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1023"],
            [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1023: {TOO_SMALL.format(1023)}, {LONGEST}; increase it"],
        ),
        (
            ["critic.forward_max_token_len_per_gpu=9"],
            [f"critic.forward_max_token_len_per_gpu=9: {TOO_SMALL.format(9)}, {LONGEST}; increase it"],
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size=12"],
            [
                f"{ACTOR}.ppo_micro_batch_size=12: the number of sequences is not divisible by the data-parallel size (12 / "
                "8 = 1.5); "
                "use ppo_micro_batch_size_per_gpu"
            ],
        ),
        (
            ["critic.enable=false"],
            [
                "critic.enable=false: algorithm.adv_estimator=gae needs the critic's values; set critic.enable=null, "
                "or use another estimator, such as grpo"
            ],
        ),
        (
            ["async_training.mode=partial", f"{ROLLOUT}.n=2"],
            [
                "async_training.mode=partial: responses contain tokens of earlier weights, and nothing corrects for them; set "
                "algorithm.rollout_correction.rollout_is=token (or sequence), or algorithm.rollout_correction.bypass_mode=true"
            ],
        ),
        (
            [
                "async_training.mode=partial",
                "algorithm.rollout_correction.rollout_is=token",
                f"{FILTER}.enable=true",
                f"{FILTER}.metric=acc",
                f"{ROLLOUT}.n=2",
                "reward.reward_model.enable=true",
                "reward.reward_model.path=judge",
            ],
            [
                "async_training.mode=partial: with algorithm.filter_groups.enable=true groups are scored while others are "
                "generated, but the reward model is on the GPUs of the rollout engine; use placement.layout=split, or servers "
                "(urls)"
            ],
        ),
        (
            ["async_training.mode=async", f"{ROLLOUT}.n=2", f"{FILTER}.enable=true"],
            [
                "async_training.mode=async: responses contain tokens of earlier weights, and nothing corrects for them; set "
                "algorithm.rollout_correction.rollout_is=token (or sequence), or algorithm.rollout_correction.bypass_mode=true",
                "async_training.mode=async: the engine generates while the trainer works, but shares its GPUs with actor, "
                "critic; use placement.layout=split, or custom with a pool for placement.roles.rollout alone",
                "async_training.mode=async: with algorithm.filter_groups.enable=true groups are judged on the controller, which "
                "trains while the next batch is generated; use async_training.mode=partial",
            ],
        ),
        (["async_training.mode=async", "async_training.max_staleness=0", "async_training.clock=wall"], []),
        (
            [
                "async_training.clock=wall",
                f"{ROLLOUT}.multi_turn.enable=true",
                f"{ROLLOUT}.multi_turn.function_tool_path=trainer/agents/native/calculator.py",
            ],
            [],
        ),
        (
            [
                f"{ROLLOUT}.multi_turn.enable=true",
                f"{ROLLOUT}.multi_turn.function_tool_path=trainer/agents/native/calculator.py",
                "reward.models={a: {path: x}, b: {urls: ['http://a']}}",
            ],
            [],
        ),
        (
            ["async_training.clock=wall"],
            [
                "async_training.clock=wall: with async_training.mode=null nothing is generated during an update; set "
                "async_training.mode=one_step_off (or async), or async_training.clock=logical"
            ],
        ),
        (
            [
                "async_training.mode=partial",
                "async_training.clock=wall",
                "algorithm.rollout_correction.rollout_is=token",
                f"{ROLLOUT}.n=2",
            ],
            [
                "async_training.clock=wall: with async_training.mode=partial nothing is generated during an update; set "
                "async_training.mode=one_step_off (or async), or async_training.clock=logical"
            ],
        ),
        (
            [
                "async_training.mode=one_step_off",
                "algorithm.rollout_correction.rollout_is=token",
                f"{ROLLOUT}.n=2",
                "reward.reward_model.enable=true",
                "reward.reward_model.path=judge",
                "trainer.n_gpus_per_node=2",
                "placement=custom",
                *(f"placement.pools.{pool}={{nodes: 1, gpus: 1, fraction: 1.0}}" for pool in ("train", "engines")),
                "placement.roles.actor=train",
                "placement.roles.rollout=engines",
                "placement.roles.reward=engines",
            ],
            [
                "async_training.mode=one_step_off: the engine generates while the trainer works, but shares its GPUs with "
                "reward; use placement.layout=split, or custom with a pool for placement.roles.rollout alone",
            ],
        ),
        *[
            (
                typed,
                [
                    f"async_training.prox_logp={prox_logp}: all tokens are of the present weights, whose log-probs are the "
                    "proximal policy's; use recompute"
                ],
            )
            for prox_logp, typed in (
                ("snapshot", ["async_training.prox_logp=snapshot"]),
                (
                    "loglinear",
                    ["async_training.prox_logp=loglinear", "async_training.mode=async", "async_training.max_staleness=0"],
                ),
            )
        ],
        (
            ["async_training.mode=partial", "async_training.prox_logp=snapshot", f"{CORRECTION}.bypass_mode=true"],
            [
                f"async_training.prox_logp=snapshot: with {CORRECTION}.bypass_mode=true the ratio is taken to the rollout's "
                "log-probs; use recompute"
            ],
        ),
        (
            [
                "async_training.mode=partial",
                "async_training.prox_logp=snapshot",
                f"{CORRECTION}.rollout_rs=token_k1",
                f"{CORRECTION}.rollout_rs_threshold=2.0",
            ],
            [],
        ),
        (
            [
                "async_training.mode=partial",
                "async_training.prox_logp=loglinear",
                f"{CORRECTION}.rollout_is=sequence",
                f"{CORRECTION}.rollout_rs=token_k1",
                f"{CORRECTION}.rollout_rs_threshold=2.0",
                "algorithm.use_kl_in_reward=true",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
                f"{CORRECTION}.rollout_token_veto_threshold=1e-4",
            ],
            [
                "async_training.prox_logp=loglinear: old log-probs are interpolated in the update, and they are needed before by "
                f"algorithm.use_kl_in_reward, {CORRECTION}.rollout_rs, {CORRECTION}.rollout_token_veto_threshold, "
                f"{CORRECTION}.rollout_is_batch_normalize; use recompute"
            ],
        ),
        (
            [
                "async_training.mode=partial",
                "async_training.prox_logp=loglinear",
                f"{CORRECTION}.rollout_rs=token_k1",
                f"{CORRECTION}.rollout_rs_threshold=2.0",
            ],
            [
                "async_training.prox_logp=loglinear: old log-probs are interpolated in the update, and they are "
                f"needed before by {CORRECTION}.rollout_rs; use recompute",
                "async_training.prox_logp=loglinear: old log-probs are interpolated in the update for the weights of stale "
                f"tokens; set {CORRECTION}.rollout_is=token (or sequence)",
            ],
        ),
        (["async_training.mode=partial", "async_training.prox_logp=loglinear", f"{CORRECTION}.rollout_is=token"], []),
        (
            [*AHEAD, "async_training.trigger_parameter_sync_step=3", "async_training.kv_cache=keep"],
            [
                "async_training.trigger_parameter_sync_step=3: a batch is generated one step ahead, with weights from up to "
                "3 - 1 steps before, so its tokens are up to 1 + 2 = 3 versions old, more than async_training.max_staleness=2; "
                "increase that, or sync more often",
                "async_training.kv_cache=keep: with async_training.pause=abort no response is running; use pause=keep",
            ],
        ),
        (
            [*AHEAD, f"{ROLLOUT}.name=sglang", "async_training.pause=keep", "async_training.kv_cache=keep"],
            [
                "async_training.kv_cache=keep: sglang cannot drop the cached prefixes of old weights while requests run, and new "
                "requests would share them; use kv_cache=recompute, or rollout.name=vllm or embedded"
            ],
        ),
        (
            ["async_training.trigger_parameter_sync_step=2", "async_training.pause=finish"],
            [
                "async_training.trigger_parameter_sync_step=2: with async_training.mode=null nothing is generated during an "
                "update; use mode=one_step_off or async, or remove it",
                "async_training.pause=finish: with async_training.mode=null nothing is generated during an update; use "
                "mode=one_step_off or async, or remove it",
            ],
        ),
        (
            ["data.gen_batch_size=2048"],
            [
                "data.gen_batch_size=2048: without algorithm.filter_groups.enable=true a step generates "
                "data.train_batch_size=1024 prompts; remove it"
            ],
        ),
        (
            [f"{FILTER}.enable=true", "data.gen_batch_size=500", f"{FILTER}.max_num_gen_batches=2", f"{ROLLOUT}.n=2"],
            [
                f"{FILTER}.max_num_gen_batches=2: 2 rounds of 500 prompts = 1000, which cannot fill data.train_batch_size=1024; "
                "increase it, or data.gen_batch_size"
            ],
        ),
        (
            [f"{FILTER}.enable=true", f"{FILTER}.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            [
                f"{FILTER}.metric=seq_final_reward: groups are filtered before algorithm.use_kl_in_reward subtracts the KL; "
                "use seq_reward, the reward before the KL"
            ],
        ),
        (
            [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=513"],
            [f"{OVERLONG}.len=513: with enable=true it must be between 1 and reward.reward_kwargs.max_resp_len=512 tokens"],
        ),
        (
            [f"{OVERLONG}.enable=true"],
            [f"{OVERLONG}.len=0: with enable=true it must be between 1 and reward.reward_kwargs.max_resp_len=512 tokens"],
        ),
        (["reward.shaping.clip=[1.0, -1]"], ["reward.shaping.clip=[1, -1]: the lower bound must be less than the upper"]),
        (
            ["trainer.backend=local"],
            [
                f"trainer.backend=local: runs a single worker in this process, not {WORKERS}; use one worker, or "
                "trainer.backend=ray"
            ],
        ),
        (
            ["trainer.resume_mode=resume_path"],
            ["trainer.resume_mode=resume_path: trainer.resume_from_path is null; set it to a global_step_N directory"],
        ),
        (
            ["trainer.project_name=../other", "trainer.experiment_name=/etc"],
            [
                "trainer.project_name=../other: is part of the run directory's path and must not lead out of it",
                "trainer.experiment_name=/etc: is part of the run directory's path and must not lead out of it",
            ],
        ),
        (
            ["trainer.replay.mode=train"],
            ["trainer.replay.mode=train: trainer.replay.path is null; set it to a step_N.safetensors of rollout_data_dir"],
        ),
        (
            ["trainer.replay.path=a"],
            ["trainer.replay.path=a: trainer.replay.mode is null; set it to rollout (generate the step again) or train"],
        ),
        (
            ["reward.judge.url=127.0.0.1:1/v1"],
            ["reward.judge.url=127.0.0.1:1/v1: must be http://HOST:PORT/PATH or https://..."],
        ),
        (
            ["reward.judge.url=http://me@host/v1"],
            [
                "reward.judge.url: contains a user name or a password; put the key into the variable named by "
                "reward.judge.api_key_env"
            ],
        ),
    ],
)
def test_an_invalid_combination_is_an_error_with_the_arithmetic(overrides: list[str], lines: list[str]) -> None:
    assert ppo_lines(*overrides) == [f"error: {line}" for line in lines]


@pytest.mark.parametrize(
    "overrides",
    [
        [
            f"{ACTOR}.ppo_max_token_len_per_gpu=9",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        ],
        [f"{REF}.log_prob_max_token_len_per_gpu=9"],  # no KL: there is no reference
        [f"{REF}.log_prob_micro_batch_size=12"],
        [f"{ROLLOUT}.max_model_len=1024"],
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1024"],
        ["trainer.backend=local", "trainer.n_gpus_per_node=1"],
        ["data.train_max_samples=-1"],
        ["data.gen_batch_size=1024"],
        [f"{FILTER}.max_num_gen_batches=2", f"{FILTER}.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
        [f"{FILTER}.enable=true", "data.gen_batch_size=512", f"{FILTER}.max_num_gen_batches=2", f"{ROLLOUT}.n=2"],
        [f"{OVERLONG}.len=513"],
        [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=512", f"{OVERLONG}.penalty_factor=1.0"],
        ["reward.shaping.clip=[0, 1]"],
    ],
)
def test_limits_of_unused_keys_are_not_checked(overrides: list[str]) -> None:
    assert ppo_lines(*overrides) == []


def test_the_reference_is_checked_if_there_is_a_kl() -> None:
    for kl in ("algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"):
        (line,) = ppo_lines(kl, f"{REF}.log_prob_micro_batch_size=12")
        assert line.startswith(f"error: {REF}.log_prob_micro_batch_size=12: ")


def test_the_critic_is_checked_only_if_it_is_used() -> None:
    wrong = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "critic.ppo_max_token_len_per_gpu=9"]
    assert ppo_lines(*wrong, needs_values=False) == []
    assert len(ppo_lines(*wrong, "critic.enable=true", needs_values=False)) == 2


def test_settings_unsupported_by_vllm_are_refused() -> None:
    vllm = ["rollout=vllm", "trainer.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    (line,) = ppo_lines(*vllm)
    assert line.startswith(f"error: {ROLLOUT}.tensor_model_parallel_size=2: does not divide 3 workers")
    assert line.endswith("(3 = 1 * 2 + 1); use a divisor")
    assert ppo_lines(*vllm[1:], "rollout=embedded") != [line], "the embedded engine is not split"
    one = ["rollout=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"]
    assert ppo_lines(*one, f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.val_kwargs.temperature=0") == []
    for words, message in (
        (f"{ROLLOUT}.dtype=float64", "dtype=float64: not supported by vLLM"),
        (f"{ROLLOUT}.temperature=0.005", "temperature=0.005: the minimum of vLLM is 0.01"),
        (f"{ROLLOUT}.val_kwargs.temperature=0.005", "val_kwargs.temperature=0.005: the minimum of vLLM is"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.model=a", "engine_kwargs.vllm.model: set by another key"),
    ):
        (line,) = ppo_lines(*one, words)
        assert line.startswith(f"error: {ROLLOUT}.{message}"), line


def test_settings_unsupported_by_sglang_are_refused() -> None:
    two = ["rollout=sglang", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    (line,) = ppo_lines(*two, "trainer.n_gpus_per_node=3")
    assert line.startswith(f"error: {ROLLOUT}.tensor_model_parallel_size=2: does not divide 3 workers")
    (line,) = ppo_lines(*two, "trainer.n_gpus_per_node=3", "trainer.nnodes=2")
    assert line.endswith("must fit on one node, but 2 does not divide the 3 GPUs of a node (3 = 1 * 2 + 1); use a divisor")
    for words, message in (
        (f"{ROLLOUT}.dtype=float64", "dtype=float64: not supported by SGLang"),
        (f"{ROLLOUT}.temperature=1e-7", "temperature=1e-07: the minimum of SGLang is 1e-06"),
        (f"+{ROLLOUT}.engine_kwargs.sglang.pp_size=3", "engine_kwargs.sglang.pp_size: set by another key"),
    ):
        (line,) = ppo_lines(*two, "trainer.n_gpus_per_node=2", words)
        assert line.startswith(f"error: {ROLLOUT}.{message}"), line


def test_vllm_keys_have_no_effect_on_the_embedded_engine() -> None:
    (note,) = ppo_lines(f"{ROLLOUT}.enforce_eager=true")
    assert note.startswith(f"{ROLLOUT}.enforce_eager has no effect")


def test_keys_without_effect_give_notes() -> None:
    assert ppo_lines(f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.gpu_memory_utilization=0.4") == [
        f"{ROLLOUT}.tensor_model_parallel_size has no effect: the embedded engine is not split over GPUs",
        f"{ROLLOUT}.gpu_memory_utilization has no effect: the embedded engine allocates memory for max_num_seqs responses",
    ]
    (note,) = ppo_lines("algorithm=grpo", needs_values=False)
    assert note.startswith(f"{ROLLOUT}.n=1: grpo compares the responses of a group, and a group of one has no baseline")
    (note,) = ppo_lines("algorithm=grpo", f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=false", needs_values=False)
    assert note.startswith(f"{ROLLOUT}.do_sample=false: the 4 responses to a prompt are identical (greedy decoding), so grpo has")
    reinforce, mode = f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.policy_loss.loss_mode=gspo"
    assert ppo_lines(reinforce) == [f"{reinforce} has no effect: {CORRECTION}.bypass_mode=false"]
    assert ppo_lines(reinforce, f"{CORRECTION}.bypass_mode=true", mode) == [f"{mode} has no effect: {reinforce} is the loss"]
    assert ppo_lines(f"{CORRECTION}.rollout_is_batch_normalize=true", f"{CORRECTION}.rollout_rs_threshold=2") == [
        f"{CORRECTION}.rollout_is_batch_normalize has no effect: {CORRECTION}.rollout_is=null",
        f"{CORRECTION}.rollout_rs_threshold=2 has no effect: {CORRECTION}.rollout_rs=null",
    ]
    gdpo = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,m]", f"{ROLLOUT}.n=4")
    added = ("algorithm.use_kl_in_reward=true", "reward.missing_eos_penalty=1", "reward.shaping.clip=[0,1]")
    model = "reward.models={m: {path: there, clip: [0, 1]}, n: {path: there, clip: [0, 1]}}"
    assert [line.partition(" has no effect")[0] for line in ppo_lines(*gdpo, *added, model, needs_values=False)] == [
        "algorithm.use_kl_in_reward", "reward.missing_eos_penalty", "reward.shaping",
        "reward.models.m: its weight, normalize or clip",
    ]  # fmt: skip
    assert ppo_lines(*gdpo, needs_values=False) == []
    assert ppo_lines(f"{FILTER}.enable=true", "reward.shaping.normalize=group") == [
        f"{FILTER}.enable has no effect: {ROLLOUT}.n=1, and groups of one are always kept",
        f"reward.shaping.normalize=group: {ROLLOUT}.n=1, so every reward becomes 0; use running, which compares with "
        "earlier steps",
    ]
    assert ppo_lines(f"{OVERLONG}.enable=true", f"{OVERLONG}.len=8", "reward.reward_kwargs.max_resp_len=520") == [
        f"{OVERLONG}.penalty_factor=0: the overlong penalty has no effect",
        "reward.reward_kwargs.max_resp_len=520: no response is long enough for the overlong penalty "
        "(data.max_response_length=512)",
    ]
    ahead = ("async_training.mode=async", "placement=split", "trainer.n_gpus_per_node=3", f"{ROLLOUT}.n=2")
    ahead += (f"{ACTOR}.ppo_mini_batch_size=1024",)
    token, bypass = f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=true"
    _, note = ppo_lines(*ahead, token)  # the first is the placement's
    assert note.startswith("async_training.max_staleness=2: a step is one update, so the ratio to the proximal policy is 1")
    for words in ((bypass,), (token, f"{ACTOR}.ppo_epochs=2"), (token, "async_training.max_staleness=1")):
        assert len(ppo_lines(*ahead, *words)) == 1
    (note,) = ppo_lines("trainer.resume_from_path=x")
    assert note == "trainer.resume_from_path has no effect with trainer.resume_mode=auto; set resume_mode=resume_path"
    (note,) = ppo_lines("trainer.best_metric=val/accuracy")
    assert note == "trainer.best_metric has no effect: trainer.save_freq=end saves no checkpoint before the last step"


def test_walltime_is_checked_in_both_programs() -> None:
    for lines in (ppo_lines, sft_lines):
        assert lines("trainer.walltime=01:30:00") == lines("trainer.walltime=5400") == lines()
        assert lines("trainer.walltime=1h") == ["error: trainer.walltime=1h: must be seconds, or [[days-]hours:]minutes:seconds"]


def test_alarms_with_an_impossible_action_are_refused() -> None:
    assert ppo_lines("alarms.reward.action=rollback", "alarms.length.action=stop") == [
        "error: alarms.reward.action=rollback: no checkpoint to restore; set trainer.save_freq, or use action=stop"
    ]
    assert ppo_lines("alarms.reward.action=rollback", "trainer.save_freq=5") == []
    assert ppo_lines("alarms.entropy.bound=0.1") == [], "it is measured by default"
    (line,) = ppo_lines("alarms.end_token.action=rollback", "trainer.save_freq=5")
    assert line.startswith("error: alarms.end_token.action=rollback: checked before the first step")
    (line,) = sft_lines("alarms.nonfinite.action=rollback")
    assert line.startswith("error: alarms.nonfinite.action=rollback: supervised training has no rollback")


def test_mismatch_alarm_follows_the_bound_of_the_correction() -> None:
    config = compose("ppo_trainer", PPOConfig, ["algorithm.rollout_correction.mismatch_bound=null"])
    assert config.alarms.mismatch.bound is None


def generation_lines(*overrides: str) -> list[str]:
    config = compose("generation", GenerationConfig, overrides)
    try:
        return check_generation(config, {override.partition("=")[0] for override in overrides})
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (
            [f"{ROLLOUT}.max_model_len=1", "trainer.backend=local"],
            [
                f"error: trainer.backend=local: runs a single worker in this process, not {WORKERS}; use one worker, or "
                "trainer.backend=ray",
                f"error: {ROLLOUT}.max_model_len=1: no room for a prompt and a response; increase it, or use null",
            ],
        ),
        (
            ["selection.sft=a.parquet", "selection.best_of_n=a.parquet", f"{ROLLOUT}.n=2"],
            ["error: selection.sft=a.parquet: same file as selection.best_of_n; use another name"],
        ),
        (
            ["selection.sft=a.parquet", "selection.preferences=a.parquet", f"{ROLLOUT}.n=2"],
            ["error: selection.preferences=a.parquet: same file as selection.sft; use another name"],
        ),
        (
            ["selection.best_of_n=a.csv"],
            ["error: selection.best_of_n=a.csv: the file name must end in .parquet or .jsonl"],
        ),
        (["selection.best_of_n=a.parquet"], [f"selection.best_of_n has no effect: {ROLLOUT}.n=1"]),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=1"],
            [f"{ROLLOUT}.tensor_model_parallel_size has no effect: the embedded engine is not split over GPUs"],
        ),
    ],
)
def test_keys_of_generation_give_these_errors_and_notes(overrides: list[str], lines: list[str]) -> None:
    assert generation_lines(*overrides) == lines


def test_a_deterministic_run_requires_deterministic_sglang_on_cuda() -> None:
    sglang = ("trainer.deterministic=true", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=1")
    (line,) = ppo_lines(*sglang)
    assert line.startswith("error: trainer.deterministic=true: SGLang on CUDA is not deterministic by default")
    assert ppo_lines(*sglang, f"+{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference=true") == []
    assert ppo_lines(*sglang, "trainer.device=cpu") == []
    assert ppo_lines("trainer.deterministic=true") == []
