"""Flags of OpenRLHF that only translate together, or whose values are computed: the functions named in configs/openrlhf.yaml."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.base.keys import ConfigError
from configs.compat.openrlhf.table import Arguments, Flag, Settings

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
NO_BOUND = 1_000_000  # threshold that truncates no importance weight
NODE = 8  # GPUs per node, unless a flag requests more
FILES = (".parquet", ".jsonl", ".json")
ON_DISK = ("/", "./", "../", "~")
WRITE_IT = "convert the data set to this file, with the columns that are read here: docs/coming_from_openrlhf.md, Data"


@dataclass(frozen=True, slots=True)
class Entry:
    """Translation of one or more flags.

    flags: names. kind: mapped: keys are set; implied: the behaviour is always on here; none: no counterpart; idle: the keys
    belong to a model that the run does not have. remark: printed after the verdict. settings: keys to set.
    """

    flags: tuple[str, ...]
    kind: Literal["mapped", "implied", "none", "idle"]
    remark: str = ""
    settings: Settings = field(default_factory=dict)


def mapped(flags: Iterable[str], settings: Settings, remark: str = "") -> Entry:
    return Entry(tuple(flags), "mapped", remark, settings)


def none(flags: Iterable[str], remark: str) -> Entry:
    return Entry(tuple(flags), "none", remark)


def implied(flags: Iterable[str], remark: str) -> Entry:
    return Entry(tuple(flags), "implied", remark)


# Conversions of a single value: (flag, arguments) -> (value, remark).


def files(flag: Flag, arguments: Arguments) -> tuple[list[str], str]:
    """Files of the data sets of ``flag``, whose split is given by another flag."""
    splits = [part.name for part in arguments.source.parts(flag.name) if part.name.endswith("split")]
    typed = [name for name in splits if arguments.has(name)]
    text = arguments.text(flag.name) or ""
    found = files_of(text, arguments.text((typed or splits)[-1 if typed else 0]) or "train")
    return found, "" if found == text.split(",") else WRITE_IT


def files_of(text: str, split: str) -> list[str]:
    """Paths of data sets after conversion to files: data/<name>/<split>.parquet; names of files are kept."""
    found = []
    for name in text.split(","):
        directory = name if name.startswith(ON_DISK) else f"data/{name}"
        found.append(name if name.endswith(FILES) else f"{directory.rstrip('/')}/{split}.parquet")
    return found


def at_least_0(flag: Flag, arguments: Arguments) -> tuple[int, str]:
    return max(0, arguments.count(flag.name)), ""


CONVERSIONS: Mapping[str, Callable[[Flag, Arguments], tuple[Any, str]]] = {"files": files, "at_least_0": at_least_0}

# Data: columns, lengths, validation.


def columns(arguments: Arguments) -> Iterator[Entry]:
    """Columns that train_sft trains on: a response column, or the assistant's turns of conversations."""
    names = ("input_key", "output_key", "apply_chat_template", "multiturn")
    prompt, response = arguments.text("input_key"), arguments.text("output_key")
    multiturn = arguments.has("multiturn")
    chats = multiturn or arguments.has("apply_chat_template")
    if response and not multiturn:
        remark = "messages use the chat template, plain text is used unchanged; write the prompts as messages" if chats else ""
        yield mapped(names, {"data.prompt_key": prompt, "data.response_key": response}, remark)
    elif chats:
        remark = "all turns of the assistant are trained; OpenRLHF trains only the last one without --multiturn"
        yield mapped(names, {"data.messages_key": prompt}, "" if multiturn else remark)
    else:
        used = [name for name in names if arguments.has(name)] or ["input_key"]
        yield none(used, "text without a response is not trained; use an empty prompt and the text as the response")


def lengths(arguments: Arguments) -> Iterator[Entry]:
    """Maximum lengths: the older command line limits prompt and response, the newer one their sum and the response."""
    names: tuple[str, ...] = ("prompt_max_len", "generate_max_len")
    remark = "longer prompts are truncated at the end, as in OpenRLHF"
    if not arguments.newer:
        prompt, response = arguments.count("prompt_max_len"), arguments.count("generate_max_len")
        if arguments.has("max_len"):
            yield none(("max_len",), "it follows from prompt_max_len and generate_max_len")
    else:
        total, typed = arguments.count("max_len"), arguments.has("generate_max_len")
        names = ("max_len", "generate_max_len") if typed else ("max_len",)
        response = arguments.count("generate_max_len") if typed else total // 2
        prompt = total - response
        if prompt < 1:
            raise ConfigError(
                f"--{arguments.spelt('max_len')} {total}: leaves {prompt} tokens for a prompt ({total} - {response})"
            )
        share = "" if typed else ", half of it because no flag limits the response"
        remark = f"prompts have {total} - {response} = {prompt}{share}; {remark}"
    settings = {"data.max_prompt_length": prompt, "data.max_response_length": response, "data.truncation": "right"}
    yield mapped(names, settings, remark)


def validation(arguments: Arguments) -> Iterator[Entry]:
    """Validation of PPO."""
    flags = arguments.source.flags
    if not arguments.text("eval_dataset"):
        train, _ = files(flags["prompt_data"], arguments)
        settings = {"data.val_files": train, "data.val_max_samples": 1, "trainer.test_freq": -1}
        yield mapped((), settings, "there is no validation, but the key needs an existing file")
        return
    found, remark = files(flags["eval_dataset"], arguments)
    sampling = f"{ROLLOUT}.val_kwargs"
    settings = {
        "data.val_files": found,
        "trainer.test_freq": arguments.count("eval_steps"),
        f"{sampling}.do_sample": arguments.number("eval_temperature") > 0,
        f"{sampling}.temperature": arguments.text("eval_temperature"),
        f"{sampling}.n": arguments.text("eval_n_samples_per_prompt"),
    }
    names = ("eval_dataset", "eval_split", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
    yield mapped(names, settings, remark)


# The algorithm and its rewards.


def critic(arguments: Arguments) -> Iterator[Entry]:
    """Critic of gae. Without a flag it is initialized from the first reward model, or from the policy with a remote one."""
    others = ("pretrain",) if arguments.text("remote_rm_url") else ("reward_pretrain", "pretrain")
    name = next((name for name in ("critic_pretrain", *others) if arguments.text(name)), None)
    if name is not None:
        path = (arguments.text(name) or "").split(",")[0]
        remark = "" if name == "critic_pretrain" else f"initialized from --{arguments.spelt(name)}"
        yield mapped(("critic_pretrain",), {"critic.model.path": path}, remark)


def kl(arguments: Arguments) -> Iterator[Entry]:
    """KL to the reference, in the reward or in the loss."""
    adaptive, names = ("kl_target", "kl_horizon"), ("init_kl_coef", "kl_estimator", "use_kl_loss", "use_kl_estimator_k3")
    coefficient = arguments.text("init_kl_coef")
    if arguments.number("init_kl_coef") <= 0:
        yield implied([name for name in (*names, *adaptive) if arguments.has(name)], "there is no reference model and no KL term")
        return
    kind = "k3" if arguments.has("use_kl_estimator_k3") else arguments.text("kl_estimator") or "k1"
    if kind not in ("k1", "k2", "k3"):
        raise ConfigError(f"--{arguments.spelt('kl_estimator')} {kind}: is none of k1, k2, k3")
    used = [name for name in names if arguments.words(name) or arguments.has(name)]
    if arguments.has("use_kl_loss"):
        settings: dict[str, Any] = {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": coefficient,
            f"{ACTOR}.kl_loss_type": kind,
        }
        yield mapped(used, settings, "the KL to the reference is a term of the loss")
        if typed := [name for name in adaptive if arguments.has(name)]:
            yield none(typed, "the coefficient of a KL term in the loss is constant")
        return
    settings = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": kind,
        "algorithm.kl_ctrl.kl_coef": coefficient,
    }
    if (target := arguments.text("kl_target")) is not None:
        used += adaptive
        settings |= {
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": target,
            "algorithm.kl_ctrl.horizon": arguments.text("kl_horizon"),
        }
    elif arguments.has("kl_horizon"):
        yield none(("kl_horizon",), "it belongs to kl_target")
    yield mapped(used, settings, "the KL to the reference is subtracted from the rewards of tokens")


def correction(arguments: Arguments) -> Iterator[Entry]:
    """Importance sampling correction between trainer and rollout engine."""
    if not arguments.has("enable_vllm_is_correction"):
        return
    kind = "icepop" if arguments.has("use_icepop") else arguments.text("vllm_is_correction_type")
    bounds, values = arguments.words("vllm_is_truncated_threshold"), arguments.numbers("vllm_is_truncated_threshold")
    if kind in ("icepop", "seq-mask-tis"):
        # The versions with these types have two bounds; before them the flag had one.
        if not arguments.has("vllm_is_truncated_threshold"):
            bounds, values = ("0.5", "5.0"), [0.5, 5.0]
        elif len(bounds) != 2:
            spelt = arguments.spelt("vllm_is_truncated_threshold")
            raise ConfigError(f"--{spelt} {' '.join(bounds)}: {kind} needs two bounds, for example 0.5 5.0")
    both, remark = "_".join(bounds), ""
    settings = {"rollout_is": "token"}
    if kind == "icepop":
        settings["rollout_is_threshold"] = both
    elif kind == "seq-mask-tis":
        # seq_mean_k1 bounds the mean of the inverse ratio: bounds are inverted and swapped.
        inverse = "_".join(f"{1 / value if value else math.inf:.9g}" for value in reversed(values))
        settings |= {
            "rollout_is_threshold": str(NO_BOUND),
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": inverse,
        }
        remark = (
            "responses whose mean ratio is out of bounds are excluded, the weights of the others are not truncated; the bounds "
            "of seq_mean_k1 are for the inverse ratio"
        )
    elif kind == "tis":
        settings["rollout_is_threshold"] = bounds[-1]
        also = f"; OpenRLHF also raises them to {bounds[0]}" if len(bounds) > 1 else ""
        remark = f"weights are truncated at {bounds[-1]}{also}"
    else:
        raise ConfigError(f"--{arguments.spelt('vllm_is_correction_type')} {kind}: is none of tis, icepop, seq-mask-tis")
    names = ("enable_vllm_is_correction", "vllm_is_correction_type", "vllm_is_truncated_threshold", "use_icepop")
    used = [name for name in names if arguments.words(name) or arguments.has(name)]
    yield mapped(used, {f"algorithm.rollout_correction.{key}": value for key, value in settings.items()}, remark)


def rewards(arguments: Arguments) -> Iterator[Entry]:
    """Source of the scores: servers, a function, or reward models on the run's GPUs."""
    path, url, normal = "reward_pretrain", "remote_rm_url", "normalize_reward"
    text, paths = arguments.text(url), (arguments.text(path) or "").split(",")
    if text and text.endswith(".py"):
        remark = (
            "its reward_func takes lists; write a function (data_source, solution_str, ground_truth, extra_info) -> score, and "
            "set reward.custom_reward_function.path to its file"
        )
        yield none((url,), remark)
    elif text:
        remark = "several servers share the requests, as in OpenRLHF; docs/reward_servers.md"
        yield mapped((url,), {"reward.remote_urls": text.split(",")}, remark)
    if text:
        if ignored := [name for name in (path, normal) if arguments.has(name)]:
            yield implied(ignored, f"--{arguments.spelt(url)} computes the scores, and normalizes them if it is written to")
    elif paths == [""]:
        if arguments.has(normal):
            yield none((normal,), f"it belongs to {path}")
    else:
        names = ["rm"] if len(paths) == 1 else [f"rm_{i}" for i in range(1, len(paths) + 1)]
        settings = {"reward.scorer": "none"} | {f"reward.models.{name}.path": it for name, it in zip(names, paths, strict=True)}
        score = "its score is the reward" if len(paths) == 1 else "the sum of their scores is the reward"
        loaded = "loaded by transformers as a classifier with one label: docs/coming_from_openrlhf.md, Reward models"
        yield mapped((path,), settings, f"{score}; {loaded}")
        if arguments.has(normal):
            remark = "by mean and std in the model's config.json, where OpenRLHF stores them, or its reward_statistics.json"
            yield mapped((normal,), {f"reward.models.{name}.normalize": "stored" for name in names}, remark)


# Batches and schedules.


def batches(arguments: Arguments) -> Iterator[Entry]:
    """Batch sizes. OpenRLHF counts a rollout in prompts and a mini-batch in responses; both are prompts here.

    Raises ConfigError if a mini-batch is not a whole number of groups, or a rollout not a multiple of it.
    """
    names = ("rollout_batch_size", "train_batch_size", "n_samples_per_prompt")
    rollout, train, n = map(arguments.count, names)
    typed = f"--{arguments.spelt('train_batch_size')} {train}"
    # Groups stay whole here: a mini-batch is counted in prompts, with all n responses to each.
    if n < 1 or train < 1 or train % n:
        quotient = f"{train} / {n} = {train / max(n, 1):.4g}"
        raise ConfigError(f"{typed}: a mini-batch contains whole groups of {n} responses here, and {quotient}")
    mini = train // n
    if rollout % mini:
        raise ConfigError(
            f"{typed}: {train} responses / {n} per prompt = {mini} prompts, but a rollout of {rollout} prompts is not a multiple "
            f"of that ({rollout} = {rollout // mini} * {mini} + {rollout % mini})"
        )
    remark = (
        f"a step has {rollout} prompts * {n} responses = {rollout * n}, a mini-batch {train} responses / {n} = {mini} prompts: "
        f"{rollout // mini} optimizer step{'s' if rollout > mini else ''} per epoch"
    )
    settings = {"data.train_batch_size": rollout, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": n}
    yield mapped(names, settings, remark)


def micro_batches(arguments: Arguments) -> Iterator[Entry]:
    """Micro-batch sizes, in responses or in tokens. Only forward passes use the rollout flags."""
    counts = ("micro_train_batch_size", "micro_rollout_batch_size")
    tokens = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
    dynamic = arguments.has("use_dynamic_batch")
    if idle := [name for name in (counts if dynamic else tokens) if arguments.has(name)]:
        yield implied(
            idle, "micro-batches are sized by tokens" if dynamic else "without use_dynamic_batch they are sized by responses"
        )
    train, forward = map(arguments.text, tokens if dynamic else counts)
    forward = forward or train
    size = "max_token_len_per_gpu" if dynamic else "micro_batch_size_per_gpu"
    settings: dict[str, Any] = {f"{ACTOR}.use_dynamic_bsz": True} if dynamic else {}
    settings |= {
        f"{ACTOR}.ppo_{size}": train,
        f"{ROLLOUT}.log_prob_{size}": forward,
        f"{REF}.log_prob_{size}": forward,
        f"critic.ppo_{size}": train,
        f"critic.forward_{size}": forward,
        f"reward.reward_model.forward_{size}": forward,
    }
    if dynamic:
        yield mapped(("use_dynamic_batch", *tokens), settings, "never changes the gradient here")
    else:
        remark = "responses per forward pass on a GPU; never changes the gradient here; without these keys, sized by tokens"
        yield mapped(counts, settings, remark)


SCHEDULES: Mapping[str | None, Settings] = {
    "cosine": {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.0},
    "linear": {"lr_scheduler_type": "linear", "min_lr_ratio": 0.0},
    "constant_with_warmup": {"lr_scheduler_type": "constant"},
    "constant": {"lr_scheduler_type": "constant", "lr_warmup_steps": 0},
}


def ppo_schedule(arguments: Arguments) -> Iterator[Entry]:
    if not arguments.newer:
        yield _schedule(arguments, ("lr_scheduler",), 0.1, f"{ACTOR}.optim", "critic.optim")
        return
    for model, optim in (("actor", f"{ACTOR}.optim"), ("critic", "critic.optim")):
        names = (f"{model}.lr_scheduler", f"{model}.min_lr_ratio")
        yield _schedule(arguments, names, arguments.number(names[1]), optim)


def schedule(arguments: Arguments) -> Iterator[Entry]:
    yield _schedule(arguments, ("lr_scheduler", "min_lr_ratio"), arguments.number("min_lr_ratio"), "optim")


def _schedule(arguments: Arguments, names: tuple[str, ...], floor: float, *optims: str) -> Entry:
    """Learning rate schedule. names: its flags, the schedule's first. floor: min_lr_ratio of cosine_with_min_lr."""
    shape = arguments.text(names[0])
    changes = SCHEDULES.get(shape, SCHEDULES["cosine"])
    if shape == "cosine_with_min_lr":
        changes = {**changes, "min_lr_ratio": floor}
    settings = {f"{optim}.{key}": value for optim in optims for key, value in changes.items()}
    if shape not in (*SCHEDULES, "cosine_with_min_lr"):
        remark = f"there is no schedule {shape}; cosine, which also decays to 0, replaces it"
        return Entry(names, "none", remark, settings)
    return mapped(names, settings, "transformers' constant schedule has no warm-up" if shape == "constant" else "")


# Engines, loggers, checkpoints.


def engine(arguments: Arguments) -> Iterator[Entry]:
    backend = arguments.text("backend")
    if backend not in (None, "vllm", "sglang"):
        raise ConfigError(f"--backend {backend}: is none of vllm, sglang")
    if _engines(arguments) < 1 and backend is None:
        remark = "no engine is requested: the embedded one generates, as transformers does in OpenRLHF"
        yield mapped(("vllm_num_engines",), {f"{ROLLOUT}.name": "embedded"}, remark)
    else:
        yield mapped(("backend", "vllm_num_engines"), {f"{ROLLOUT}.name": backend or "vllm"})


def loggers(arguments: Arguments) -> Iterator[Entry]:
    used, remarks = ["console"], []
    if arguments.text("use_wandb"):
        used.append("wandb")
        remarks.append("set the environment variable WANDB_API_KEY to the key")
    if arguments.text("use_tensorboard"):
        used.append("tensorboard")
        remarks.append("TensorBoard's files are in the run directory")
    yield mapped(("use_wandb", "use_tensorboard"), {"trainer.logger": used}, "; ".join(remarks))


def checkpoints(arguments: Arguments) -> Iterator[Entry]:
    """Checkpoints of PPO. A model is exported from a checkpoint afterwards, not saved by the run itself."""
    directory, model, steps = arguments.text("ckpt_path"), arguments.text("save_path"), arguments.count("save_steps")
    export = f"export the model afterwards: python -m trainer.main_export checkpoint={directory} output={model}"
    settings = {"trainer.save_freq": steps if steps > 0 else "end"}
    yield mapped(("save_steps", "save_path"), settings, export if steps > 0 else f"only the last step is saved; {export}")


def task(arguments: Arguments) -> Iterator[Entry]:
    """Rollout engine of batch_inference. Raises ConfigError for a task without a counterpart."""
    wanted = arguments.text("eval_task")
    names = {"generate_vllm": "vllm", "generate_sglang": "sglang", "generate": "embedded"}
    if wanted not in names:
        remedy = f"known: {', '.join(names)}"
        if wanted == "rm":
            remedy = "selection.score scores responses while they are generated; existing files are not scored"
        raise ConfigError(f"--eval_task {wanted}: has no counterpart; {remedy}")
    yield mapped(("eval_task",), {f"{ROLLOUT}.name": names[wanted]})


# GPUs.

SIZES = [f"{role}_{size}" for role in ("actor", "ref", "critic", "reward") for size in ("num_nodes", "num_gpus_per_node")]
SHARED = {"ref": ("actor", "colocate_actor_ref"), "reward": ("critic", "colocate_critic_reward")}
"""{role: (role whose pool it may share, flag for it)}."""


def models(arguments: Arguments) -> list[str]:
    """Models of the run, the actor first. Under LoRA the reference is the actor without its adapter, not a separate model."""
    has = {
        "actor": True,
        "ref": arguments.number("init_kl_coef") > 0 and arguments.count("lora_rank") == 0,
        "critic": arguments.text("advantage_estimator") == "gae",
        "reward": arguments.has("reward_pretrain") and not arguments.has("remote_rm_url"),
    }
    return [role for role, is_used in has.items() if is_used]


def unused_prefixes(arguments: Arguments) -> Mapping[str, str]:
    """{prefix of keys: reason why the run does not use them}."""
    used, estimator = models(arguments), "advantage_estimator"
    reasons = {
        "ref": (f"{REF}.", "the run has no reference model"),
        "critic": ("critic.", f"--{arguments.spelt(estimator)} {arguments.text(estimator)} has no critic"),
        "reward": ("reward.reward_model.", "the run has no reward model on its own GPUs"),
    }
    return dict(reason for role, reason in reasons.items() if role not in used)


def placement(arguments: Arguments) -> Iterator[Entry]:
    """Nodes, GPUs and pools. Raises ConfigError if colocated models have different sizes or engines do not fit."""
    used_models = models(arguments)
    if absent := [name for name in SIZES if name.split("_")[0] not in used_models and arguments.has(name)]:
        yield implied(absent, "the run has no such model")
    used = [name for name in SIZES if name.split("_")[0] in used_models]
    flags = ("colocate_all_models", *(flag for _, flag in SHARED.values()))
    engines, per_engine = _engines(arguments), arguments.count("vllm_tensor_parallel_size")
    if arguments.has("colocate_all_models"):
        nodes, gpus = _size(arguments, "actor")
        if engines and engines * per_engine != nodes * gpus:
            raise ConfigError(
                f"--{arguments.spelt('colocate_all_models')}: the engines use the actor's GPUs, and {engines} engines * "
                f"{per_engine} = {engines * per_engine} are not {nodes} nodes * {gpus} = {nodes * gpus}"
            )
        settings = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus, "placement.layout": "colocate_all"}
        yield mapped((*flags, *used), settings, "all models and the engine share the actor's GPUs")
        return
    pools, roles = _pools(arguments, used_models)
    remarks = []
    if engines:
        pools["rollout"] = _engine_pool(arguments, engines, per_engine, max(NODE, *(gpus for _, gpus in pools.values())))
        roles["rollout"] = "rollout"
        remarks.append(
            f"{engines} engine{'s' if engines > 1 else ''} * {per_engine} = {engines * per_engine} GPUs, separate from the models"
        )
    nodes, gpus = _nodes(list(pools.values()))
    settings = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus}
    if len(pools) > 1:
        sizes = {name: {"nodes": nodes, "gpus": gpus, "fraction": 1.0} for name, (nodes, gpus) in pools.items()}
        chosen = {f"placement.roles.{role}": pool for role, pool in roles.items()}
        settings |= {"placement.layout": "custom", "placement.pools": sizes, **chosen}
    total = " + ".join(f"{name} {nodes} * {gpus}" for name, (nodes, gpus) in pools.items())
    remarks.append(f"{total} = {sum(nodes * gpus for nodes, gpus in pools.values())} GPUs, on {nodes} * {gpus}")
    yield mapped((*flags[1:], *used), settings, "; ".join(remarks))


def sleep(arguments: Arguments) -> Iterator[Entry]:
    """Sleep mode of the rollout engine, which needs it only if it shares GPUs."""
    if arguments.has("colocate_all_models"):
        yield mapped(("vllm_enable_sleep",), {f"{ROLLOUT}.free_cache_engine": arguments.has("vllm_enable_sleep")})
    elif arguments.has("vllm_enable_sleep"):
        yield implied(("vllm_enable_sleep",), "an engine with its own GPUs does not sleep")


def _engines(arguments: Arguments) -> int:
    return arguments.count("vllm_num_engines") if arguments.text("vllm_num_engines") else 0


def _size(arguments: Arguments, role: str) -> tuple[int, int]:
    """(nodes, GPUs per node) of a role."""
    return arguments.count(f"{role}_num_nodes"), arguments.count(f"{role}_num_gpus_per_node")


def _pools(arguments: Arguments, used_models: list[str]) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """({pool: (nodes, GPUs per node)}, {role: pool}) of the models."""
    pools: dict[str, tuple[int, int]] = {}
    roles: dict[str, str] = {}
    for role in used_models:
        # A role shares another's pool only if that role exists and the flag for it is set.
        host, flag = SHARED.get(role, ("", ""))
        size = _size(arguments, role)
        if host not in pools or not arguments.has(flag):
            pools[role], roles[role] = size, role
            continue
        if size != pools[host]:
            different = " and ".join(f"{name} {nodes} * {gpus}" for name, (nodes, gpus) in ((host, pools[host]), (role, size)))
            raise ConfigError(
                f"--{arguments.spelt(flag)}: these models share their GPUs, but {different} (nodes * GPUs) are different"
            )
        roles[role] = host
    return pools, roles


def _engine_pool(arguments: Arguments, engines: int, per_engine: int, node: int) -> tuple[int, int]:
    """(nodes, GPUs per node) for the engines: the fewest nodes with the same number of whole engines on each."""
    for nodes in range(1, engines + 1):
        if engines % nodes == 0 and engines // nodes * per_engine <= node:
            return nodes, engines // nodes * per_engine
    typed = f"--{arguments.spelt('vllm_tensor_parallel_size')} {per_engine}"
    raise ConfigError(f"{typed}: an engine is on one node, and {per_engine} GPUs are more than {node}")


def _nodes(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """(nodes, GPUs per node) that hold all pools: one node if possible; otherwise each pool follows the one before it.

    A pool that fits into the GPUs left on the last node shares that node; any other pool starts on new nodes.
    """
    total = sum(gpus for _, gpus in sizes)
    if len(sizes) == 1 or (all(nodes == 1 for nodes, _ in sizes) and total <= NODE):
        return sizes[0][0], total
    node = max(NODE, *(gpus for _, gpus in sizes))
    count = left = 0
    for nodes, gpus in sizes:
        if nodes == 1 and gpus <= left:
            left -= gpus
        else:
            count, left = count + nodes, node - gpus
    return count, node


Rule = Callable[[Arguments], Iterable[Entry]]
"""Translates several flags to several keys. Raises ConfigError if a value cannot be translated."""
RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        columns, lengths, validation, critic, kl, correction, rewards, batches, micro_batches, ppo_schedule, schedule, engine,
        loggers, checkpoints, task, placement, sleep,
    )
}  # fmt: skip
"""Rules by their names in configs/openrlhf.yaml."""
