"""Rules of configs/openrlhf.yaml for batches, schedules, engines, loggers and checkpoints."""

from collections.abc import Iterator
from typing import Any

from configs.base.keys import ConfigError
from configs.compat.openrlhf.arguments import Arguments
from configs.compat.openrlhf.entries import Entry, implied, mapped, none

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
AT_THE_END = 1_000_000_000  # save_freq in steps beyond any run: only the last step is saved


def batches(arguments: Arguments) -> Iterator[Entry]:
    """Batch sizes. OpenRLHF counts a rollout in prompts and a mini-batch in responses; both are prompts here.

    Raises ConfigError if a mini-batch is not a whole number of groups, or a rollout not a multiple of it.
    """
    rollout, train, n = (arguments.count(name) for name in ("rollout_batch_size", "train_batch_size", "n_samples_per_prompt"))
    typed = f"--{arguments.spelt('train_batch_size')} {train}"
    if n < 1 or train % n:
        raise ConfigError(
            f"{typed}: a mini-batch is whole groups of {n} answers here, and {train} / {n} = {train / max(n, 1):.4g}"
        )
    # Groups stay whole here: a mini-batch is counted in prompts, with all n responses to each.
    mini = train // n
    if rollout % mini:
        raise ConfigError(
            f"{typed}: {train} answers / {n} a prompt = {mini} prompts, of which a rollout of {rollout} prompts is no multiple "
            f"({rollout} = {rollout // mini} * {mini} + {rollout % mini})"
        )
    said = (
        f"a step has {rollout} prompts * {n} answers = {rollout * n}, a mini-batch {train} answers / {n} = {mini} prompts, so "
        f"{rollout // mini} optimizer step{'s' if rollout > mini else ''} an epoch"
    )
    settings = {"data.train_batch_size": rollout, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": n}
    yield mapped(("rollout_batch_size", "train_batch_size", "n_samples_per_prompt"), settings, said)


def micro_batches(arguments: Arguments) -> Iterator[Entry]:
    counts, tokens = (
        ("micro_train_batch_size", "micro_rollout_batch_size"),
        ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu"),
    )
    dynamic = arguments.has("use_dynamic_batch")
    idle = [name for name in (counts if dynamic else tokens) if arguments.has(name)]
    if idle:
        yield implied(
            idle, "micro-batches are cut by tokens" if dynamic else "micro-batches are cut by answers, without use_dynamic_batch"
        )
    ref = "actor_rollout_ref.ref"
    if dynamic:
        train = arguments.text("train_max_tokens_per_gpu")
        forward = arguments.text("rollout_max_tokens_per_gpu") or train
        settings: dict[str, Any] = {
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.ppo_max_token_len_per_gpu": train,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": forward,
            f"{ref}.log_prob_max_token_len_per_gpu": forward,
            "critic.ppo_max_token_len_per_gpu": train,
            "critic.forward_max_token_len_per_gpu": forward,
            "reward.reward_model.forward_max_token_len_per_gpu": forward,
        }
        yield mapped(("use_dynamic_batch", *tokens), settings, "never changes the gradient here")
        return
    train, forward = (arguments.text(name) for name in counts)
    settings = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": train,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": forward,
        f"{ref}.log_prob_micro_batch_size_per_gpu": forward,
        "critic.ppo_micro_batch_size_per_gpu": train,
        "critic.forward_micro_batch_size_per_gpu": forward,
        "reward.reward_model.forward_micro_batch_size_per_gpu": forward,
    }
    yield mapped(
        counts, settings, "answers a forward on one GPU, never changes the gradient here; left out, they are cut by tokens"
    )


def ppo_schedule(arguments: Arguments) -> Iterator[Entry]:
    if not arguments.newer:
        yield _schedule(arguments, ("lr_scheduler",), 0.1, (f"{ACTOR}.optim", "critic.optim"))
        return
    for model, optim in (("actor", f"{ACTOR}.optim"), ("critic", "critic.optim")):
        names = (f"{model}.lr_scheduler", f"{model}.min_lr_ratio")
        yield _schedule(arguments, names, arguments.number(names[1]), (optim,))


def schedule(arguments: Arguments) -> Iterator[Entry]:
    names = ("lr_scheduler", "min_lr_ratio")
    yield _schedule(arguments, names, arguments.number("min_lr_ratio"), ("optim",))


def _schedule(arguments: Arguments, names: tuple[str, ...], floor: float, optims: tuple[str, ...]) -> Entry:
    """Learning rate schedule. names: its flags, the schedule's first. floor: min_lr_ratio of cosine_with_min_lr."""
    shape, said = arguments.text(names[0]), ""
    changes: dict[str, Any]
    match shape:
        case "cosine_with_min_lr":
            changes = {"lr_scheduler_type": "cosine", "min_lr_ratio": floor}
        case "cosine":
            changes = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.0}
        case "linear":
            changes = {"lr_scheduler_type": "linear", "min_lr_ratio": 0.0}
        case "constant_with_warmup":
            changes = {"lr_scheduler_type": "constant"}
        case "constant":
            changes, said = {"lr_scheduler_type": "constant", "lr_warmup_steps": 0}, "transformers' constant has no warm-up"
        case _:
            changes = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.0}
            said = f"there is no schedule {shape}; cosine, which falls to 0 as well, stands in"
            return Entry(names, "none", said, {f"{optim}.{key}": value for optim in optims for key, value in changes.items()})
    return mapped(names, {f"{optim}.{key}": value for optim in optims for key, value in changes.items()}, said)


def engine(arguments: Arguments) -> Iterator[Entry]:
    engines, backend = int(arguments.text("vllm_num_engines") or 0), arguments.text("backend")
    if backend not in (None, "vllm", "sglang"):
        raise ConfigError(f"--backend {backend}: is none of vllm, sglang")
    if engines < 1 and backend is None:
        yield mapped(
            ("vllm_num_engines",),
            {f"{ROLLOUT}.name": "embedded"},
            "no engine is asked for: our own generates, as transformers does there",
        )
        return
    yield mapped(("backend", "vllm_num_engines"), {f"{ROLLOUT}.name": backend or "vllm"})


def loggers(arguments: Arguments) -> Iterator[Entry]:
    wandb, tensorboard = arguments.text("use_wandb"), arguments.text("use_tensorboard")
    used = ["console", *(["wandb"] if wandb else []), *(["tensorboard"] if tensorboard else [])]
    said = [
        *(["the key belongs into the environment, as WANDB_API_KEY"] if wandb else []),
        *(["TensorBoard's files are in the run directory"] if tensorboard else []),
    ]
    yield mapped(("use_wandb", "use_tensorboard"), {"trainer.logger": used}, "; ".join(said))


def checkpoints(arguments: Arguments) -> Iterator[Entry]:
    """Checkpoints of PPO. A model is exported from a checkpoint afterwards, not saved by the run itself."""
    directory, model, steps = arguments.text("ckpt_path"), arguments.text("save_path"), arguments.count("save_steps")
    yield mapped(("ckpt_path",), {"trainer.default_local_dir": directory}, "the run directory, checkpoints and all else")
    export = f"the model is made afterwards: python -m trainer.main_export checkpoint={directory} output={model}"
    settings = {"trainer.save_freq": steps if steps > 0 else AT_THE_END}
    yield mapped(("save_steps", "save_path"), settings, export if steps > 0 else f"the last step alone is saved; {export}")


def ema(arguments: Arguments) -> Iterator[Entry]:
    if arguments.has("enable_ema"):
        yield mapped(("enable_ema", "ema_beta"), {f"{ACTOR}.ema_decay": arguments.text("ema_beta")})
    elif arguments.has("ema_beta"):
        yield none(("ema_beta",), "it goes with enable_ema")


def task(arguments: Arguments) -> Iterator[Entry]:
    """Rollout engine of batch_inference. Raises ConfigError for a task without a counterpart."""
    wanted = arguments.text("eval_task")
    names = {"generate_vllm": "vllm", "generate_sglang": "sglang", "generate": "embedded"}
    if wanted not in names:
        known = f"known: {', '.join(names)}"
        why = "answers that are made can be scored beside (selection.score), a file of them cannot" if wanted == "rm" else known
        raise ConfigError(f"--eval_task {wanted}: has no counterpart; {why}")
    yield mapped(("eval_task",), {f"{ROLLOUT}.name": names[wanted]})
    size = arguments.text("tp_size")
    if size:
        settings = {f"{ROLLOUT}.tensor_model_parallel_size": size, "trainer.n_gpus_per_node": size}
        yield mapped(("tp_size",), settings, "one engine over so many GPUs; more GPUs are more engines")
