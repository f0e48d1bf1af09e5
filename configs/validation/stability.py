"""Validate combinations of stability options (EMA, auxiliary pretraining loss, whitening, penalties, alarms); see
configs/validation/programs.py.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict

from configs.schema.common import is_repeated
from configs.schema.ppo import PPOConfig
from configs.validation.batches import Cut
from configs.validation.rollout import ROLLOUT

ACTOR = "actor_rollout_ref.actor"
# Estimators whose advantages already have mean 0 and standard deviation 1, over the tokens of the batch or within each group.
WHITENED = {
    "batch": ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"),
    "group": ("grpo",),
}


def stability_problems(config: PPOConfig) -> Iterator[str]:
    """Problems of the moving average and of the auxiliary pretraining loss."""
    models, data = config.actor_rollout_ref, config.data
    actor, decay = models.actor, models.actor.ema_decay
    if decay is not None and actor.strategy == "megatron":
        advice = "use null, or strategy=fsdp"
        yield f"{ACTOR}.ema_decay={decay:g}: {ACTOR}.strategy=megatron does not support a moving average; {advice}"
    if decay is not None and models.model.has_adapter:
        yield f"{ACTOR}.ema_decay={decay:g}: a moving average of a LoRA adapter is not supported; use null"
    if data.ptx_files is None:
        return
    if models.rollout.temperature != 1.0:
        yield (
            f"data.ptx_files: needs {ROLLOUT}.temperature=1, not {models.rollout.temperature:g}: all log-probs of a "
            "mini-batch are "
            "computed at one temperature, and the pretraining loss is defined at temperature 1"
        )
    try:
        most, _ = Cut(ACTOR, "ppo_", actor.micro_batching, actor, config.trainer).limits()
    except ValueError:
        return  # reported by configs/validation/batches.py
    # Pretraining rows share micro-batches with the responses and are never split either.
    if most is not None and most < data.ptx_max_length:
        holds = f"a micro-batch of the actor holds {most} tokens; increase {ACTOR}.ppo_max_token_len_per_gpu"
        yield f"data.ptx_max_length={data.ptx_max_length}: {holds}"


def stability_notes(config: PPOConfig, typed: Collection[str], *, has_critic: bool) -> Iterator[str]:
    """Warnings about options that are redundant, without effect, or counted twice."""
    algorithm, reward, over = config.algorithm, config.reward, config.algorithm.whiten_advantages
    if over is not None:
        for kind, estimators in WHITENED.items():
            # GRPO only divides by the deviation with norm_adv_by_std_in_grpo; without it, whitening is not redundant.
            if algorithm.adv_estimator in estimators and (kind == "batch" or algorithm.norm_adv_by_std_in_grpo):
                already = f"algorithm.adv_estimator={algorithm.adv_estimator} already whitens over each {kind}"
                yield f"algorithm.whiten_advantages={over}: advantages are whitened twice; {already}"
    if algorithm.kl_clip is not None and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_clip has no effect: algorithm.use_kl_in_reward=false"
    if config.trainer.critic_warmup > 0 and not has_critic:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup}: there is no critic, so nothing is trained during these steps"
        )
    if config.data.ptx_files is None:
        without = ("data.ptx_", f"{ACTOR}.ptx_")
        for key in sorted(key for key in typed if key.startswith(without) and key != "data.ptx_files"):
            yield f"{key} has no effect: data.ptx_files=null"
    penalty = reward.missing_eos_penalty
    if penalty is None:
        return
    key, cut = f"reward.missing_eos_penalty={penalty:g}", f"algorithm.truncated_answers={algorithm.truncated_answers}"
    if config.actor_rollout_ref.rollout.ignore_eos:
        yield f"{key}: every response is penalized, because none terminates with {ROLLOUT}.ignore_eos=true"
    if algorithm.truncated_answers == "mask":
        yield f"{key}: {cut} excludes the penalized responses from the loss; the penalty only affects the baseline of their group"
    if algorithm.truncated_answers == "bootstrap":
        yield (
            f"{key}: {cut} adds the critic's value at the truncation, as if the response continued; the penalty is subtracted "
            "as well"
        )
    overlong = reward.reward_kwargs.overlong_buffer_cfg
    if overlong.enable:
        both = f"{penalty:g} + {overlong.penalty_factor:g} = {penalty + overlong.penalty_factor:g}"
        yield f"{key}: a response truncated at reward.reward_kwargs.max_resp_len also gets the overlong penalty, {both}"


def alarm_problems(config: PPOConfig) -> Iterator[str]:
    """Problems of the `alarms` block of PPO: rollbacks that have no checkpoint to restore."""
    for name, alarm in asdict(config.alarms).items():
        if name != "max_rollbacks" and alarm["action"] == "rollback" and not is_repeated(config.trainer.save_freq):
            yield f"alarms.{name}.action=rollback: no checkpoint to restore; set trainer.save_freq, or use action=stop"
    if config.alarms.end_token.action == "rollback":
        yield (
            "alarms.end_token.action=rollback: checked before the first step, when there is no checkpoint to restore; use "
            "action=stop"
        )
