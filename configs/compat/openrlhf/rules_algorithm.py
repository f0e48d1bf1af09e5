"""Rules of configs/openrlhf.yaml for the algorithm and its rewards."""

import math
from collections.abc import Iterator
from typing import Any

from configs.base.keys import ConfigError
from configs.compat.openrlhf.arguments import Arguments, number
from configs.compat.openrlhf.entries import Entry, implied, mapped, none

ACTOR = "actor_rollout_ref.actor"
NO_BOUND = 1_000_000  # threshold that truncates no importance weight


def critic(arguments: Arguments) -> Iterator[Entry]:
    """Critic of gae. Without a flag it is initialised from the first reward model, or from the policy with a remote one."""
    others = ("pretrain",) if arguments.text("remote_rm_url") else ("reward_pretrain", "pretrain")
    names = [name for name in ("critic_pretrain", *others) if arguments.text(name)]
    if names:
        path = (arguments.text(names[0]) or "").split(",")[0]
        said = "" if names[0] == "critic_pretrain" else f"it begins as --{arguments.spelt(names[0])}"
        yield mapped(("critic_pretrain",), {"critic.model.path": path}, said)


def kl(arguments: Arguments) -> Iterator[Entry]:
    names = ["init_kl_coef", "kl_estimator", "use_kl_loss", "kl_target", "kl_horizon", "use_kl_estimator_k3"]
    coefficient = arguments.number("init_kl_coef")
    typed = [name for name in names if arguments.has(name)]
    if coefficient <= 0:
        yield implied(typed, "there is no reference, and no KL")
        return
    kind = "k3" if arguments.has("use_kl_estimator_k3") else arguments.text("kl_estimator") or "k1"
    if kind not in ("k1", "k2", "k3"):
        raise ConfigError(f"--{arguments.spelt('kl_estimator')} {kind}: is none of k1, k2, k3")
    target, adaptive = arguments.text("kl_target"), ("kl_target", "kl_horizon")
    used = [name for name in names if name not in adaptive and (arguments.words(name) or arguments.has(name))]
    if arguments.has("use_kl_loss"):
        settings: dict[str, Any] = {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": arguments.text("init_kl_coef"),
            f"{ACTOR}.kl_loss_type": kind,
        }
        yield mapped(used, settings, "the KL to the reference is in the loss")
        if with_target := [name for name in adaptive if arguments.has(name)]:
            yield none(with_target, "the coefficient of a KL in the loss stays as it is")
        return
    settings = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": kind,
        "algorithm.kl_ctrl.kl_coef": arguments.text("init_kl_coef"),
    }
    if target is not None:
        used += adaptive
        settings |= {
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": target,
            "algorithm.kl_ctrl.horizon": arguments.text("kl_horizon"),
        }
    elif arguments.has("kl_horizon"):
        yield none(("kl_horizon",), "it goes with kl_target")
    yield mapped(used, settings, "the KL to the reference is taken off the rewards of tokens")


def warmup(arguments: Arguments) -> Iterator[Entry]:
    yield mapped(("freezing_actor_steps",), {"trainer.critic_warmup": max(0, arguments.count("freezing_actor_steps"))})


def correction(arguments: Arguments) -> Iterator[Entry]:
    """Importance sampling correction between trainer and rollout engine."""
    names = ["enable_vllm_is_correction", "vllm_is_correction_type", "vllm_is_truncated_threshold", "use_icepop"]
    used = [name for name in names if arguments.has(name)]
    if not arguments.has(names[0]):
        if used:
            yield none(used, "it goes with enable_vllm_is_correction")
        return
    kind = "icepop" if arguments.has("use_icepop") else arguments.text("vllm_is_correction_type")
    bounds = arguments.words("vllm_is_truncated_threshold")
    values = [number(bound, arguments.spelt("vllm_is_truncated_threshold")) for bound in bounds]
    both, key = "_".join(bounds), "algorithm.rollout_correction"
    shown = [name for name in names if arguments.words(name) or arguments.has(name)]
    if kind == "icepop":
        yield mapped(shown, {f"{key}.rollout_is": "token", f"{key}.rollout_is_threshold": both})
    elif kind == "seq-mask-tis":
        settings = {
            f"{key}.rollout_is": "token",
            f"{key}.rollout_is_threshold": str(NO_BOUND),
            f"{key}.rollout_rs": "seq_mean_k1",
            # seq_mean_k1 bounds the mean of the inverse ratio: bounds are inverted and swapped.
            f"{key}.rollout_rs_threshold": "_".join(f"{1 / value if value else math.inf:.9g}" for value in reversed(values)),
        }
        said = "answers whose mean ratio is outside are left out, the others' weights are not truncated"
        yield mapped(shown, settings, f"{said}; the bounds of seq_mean_k1 are on the inverse ratio")
    elif kind == "tis":
        said = f"weights are cut above {bounds[-1]}" + (f"; there they are also raised to {bounds[0]}" if len(bounds) > 1 else "")
        yield mapped(shown, {f"{key}.rollout_is": "token", f"{key}.rollout_is_threshold": bounds[-1]}, said)
    else:
        raise ConfigError(f"--{arguments.spelt('vllm_is_correction_type')} {kind}: is none of tis, icepop, seq-mask-tis")


def overlong(arguments: Arguments) -> Iterator[Entry]:
    names = ("overlong_buffer_len", "overlong_penalty_factor")
    if arguments.text(names[0]) is None:
        if arguments.has(names[1]):
            yield none(names[1:], "it goes with overlong_buffer_len")
        return
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    settings = {
        f"{key}.enable": True,
        f"{key}.len": arguments.count(names[0]),
        f"{key}.penalty_factor": arguments.text(names[1]),
    }
    yield mapped(names, settings)


def filtering(arguments: Arguments) -> Iterator[Entry]:
    """Dynamic sampling: replace groups whose responses have equal scores."""
    bounds, size = "dynamic_filtering_reward_range", "vllm_generate_batch_size"
    if not arguments.has("dynamic_filtering"):
        if arguments.has(bounds):
            yield none((bounds,), "it goes with dynamic_filtering")
        if arguments.has(size):
            yield none((size,), "a step generates data.train_batch_size prompts")
        return
    settings: dict[str, Any] = {"algorithm.filter_groups.enable": True}
    names = ["dynamic_filtering", bounds]
    if arguments.has(size):
        names.append(size)
        settings["data.gen_batch_size"] = arguments.text(size)
    low, high = (number(bound, arguments.spelt(bounds)) for bound in arguments.words(bounds))
    said = "groups are kept whose answers differ in score; with scores of 0 and 1 that is a mean between 0 and 1"
    if (low, high) != (0.0, 1.0):
        said = f"groups are kept whose answers differ in score; there, those whose mean is between {low:g} and {high:g}"
    yield mapped(names, settings, said)


def rewards(arguments: Arguments) -> Iterator[Entry]:
    """Source of the scores: servers, a function, or reward models on the run's GPUs."""
    path, url, normal = "reward_pretrain", "remote_rm_url", "normalize_reward"
    text = arguments.text(url)
    if text and text.endswith(".py"):
        said = (
            "its reward_func takes lists; write a function (data_source, solution_str, ground_truth, extra_info) -> score, and "
            "name its file with reward.custom_reward_function.path"
        )
        yield none((url,), said)
    elif text:
        yield mapped((url,), {"reward.remote_urls": text.split(",")}, "several share the work, as there; docs/reward_servers.md")
    if text:
        if ignored := [name for name in (path, normal) if arguments.has(name)]:
            yield implied(ignored, f"--{arguments.spelt(url)} scores in its place, and normalises if it likes")
        return
    paths = (arguments.text(path) or "").split(",")
    if paths == [""]:
        if arguments.has(normal):
            yield none((normal,), f"it goes with {path}")
        return
    names = ["rm"] if len(paths) == 1 else [f"rm_{i}" for i in range(1, len(paths) + 1)]
    settings = {"reward.scorer": "none"} | {f"reward.models.{name}.path": it for name, it in zip(names, paths, strict=True)}
    said = "its score alone counts" if len(paths) == 1 else "their sum counts"
    yield mapped(
        (path,),
        settings,
        f"{said}; it is loaded by transformers, as a classifier with one label: docs/coming_from_openrlhf.md, Reward models",
    )
    if arguments.has(normal):
        stored = "by mean and std in the model's config.json, where OpenRLHF has them, or its reward_statistics.json"
        yield mapped((normal,), {f"reward.models.{name}.normalize": "stored" for name in names}, stored)
