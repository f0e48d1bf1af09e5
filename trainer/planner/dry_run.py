"""Dry run (trainer.dry_run=full): run all checks, print models, work, placement and memory, and try a few prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from configs.reward_models import model_key, reward_models
from configs.schema.common import ModelConfig, is_ever, is_repeated
from configs.schema.placement import Placement
from configs.schema.ppo import PPOConfig, asks_rules
from configs.schema.scoring_model import ScoringModelConfig
from configs.validation.batches import cuts, name_of, roles_of
from configs.validation.parallel import data_parallel_size
from configs.validation.placement import placement_of
from configs.validation.rollout import engine_ranks, world_size
from trainer.checkpoint.resume import Checkpoint, check_config, check_in_flight, complete_checkpoint
from trainer.cluster.launch import RunWorkers
from trainer.planner.memory_estimate import Use, estimate, memory_roles, shape_of
from trainer.planner.memory_model import Shape
from trainer.planner.trial import trial
from trainer.ppo.ppo_builder import Assembly, check_engines, continues_groups, reader, wants_critic
from trainer.resilience.alarms import NO_END_TOKEN
from trainer.resilience.restart import RunLifecycle
from trainer.rewards.models.reward_builder import engine_model, head_of, own_conversations
from trainer.rewards.pool.worker import resolve
from trainer.rewards.rules.reward_registry import with_own_function
from trainer.rollout.rollout_builder import end_tokens, rollout_spec
from trainer.run.run_dir import CONFIG, METRICS, owner_only, write_config
from workers.controller.logs import announce
from workers.engine.base import Head
from workers.engine.hf.hf_model import DTYPES, empty_model, model_config
from workers.engine.staging import usable_memory
from workers.host_memory import GB, host_memory
from workers.roles.rollout_engines import check_installed, check_supported
from workers.rollout.base import Sampling

DRY_RUN_CONFIG = "config_dry_run.yaml"
"""File name for the configuration if the run directory already contains a run, whose config.yaml is kept."""


def dry_run(config: PPOConfig) -> None:
    """Check, print the plan, and write the configuration into the run directory. Raises ValueError and FileNotFoundError."""
    # From here on the configuration is that of the run itself, as it would be written and compared on resume.
    config = replace(config, trainer=replace(config.trainer, dry_run=None))
    check_installed(config.actor_rollout_ref.rollout.name)
    check_engines(config)
    place = placement_of(config, has_critic=wants_critic(config))
    lifecycle = RunLifecycle(config.trainer, Path(config.trainer.default_local_dir))
    resume = would_resume(config, lifecycle.run_dir)
    # Without worker groups: the assembly reads and checks the data, and computes steps and updates, but builds no model.
    parts = Assembly(config, place, RunWorkers({}, None), lifecycle, reader(config))
    announce(parts.rate_changes(resume))
    check_rewards(config, parts)
    if config.trainer.replay.mode is None:
        check_agents(config, parts)
    actor = config.actor_rollout_ref
    check_supported(rollout_spec(actor.model, actor.rollout, config.data, config.trainer.device))
    models = measured(config)
    lines = [*model_lines(models), *work_lines(parts), *place_lines(config, place)]
    lines += [*written_lines(config, lifecycle.run_dir, resume, staged_bytes(config, place, models))]
    lines += [*memory_lines(config, place, models)]
    tried = trial(config, parts.data, parts.tokenizer, parts.sampling(), models["actor_rollout_ref.actor"].parameters)
    lines += ["a trial of some prompts", *tried.lines]
    wrong = [*doubts(config, place, models, parts.sampling()), *tried.wrong]
    print("\n".join([*lines, *wrong]))
    print(f"{'' if wrong else 'fine, '}no training was started; the configuration: {write(config, lifecycle.run_dir)}")


def would_resume(config: PPOConfig, run_dir: Path) -> Checkpoint | None:
    """The local checkpoint that the run would resume from, None if it starts anew. Raises ValueError if it cannot be used."""
    trainer = config.trainer
    found = complete_checkpoint(trainer.resume_mode, trainer.resume_from_path, run_dir)
    if found is not None:
        if not trainer.val_only:
            check_in_flight(found, continued=continues_groups(config), train_files=config.data.train_files)
        announce(f"would be resumed with another {change}" for change in check_config(found.manifest.config, asdict(config)))
    return found


def check_agents(config: PPOConfig, parts: Assembly) -> None:
    """Load tools and environments in an agent process, as the run does, and end it. Raises ValueError."""
    with ExitStack() as stack:
        one = replace(config.actor_rollout_ref.rollout.agent, num_workers=1)
        rollout = replace(config.actor_rollout_ref.rollout, agent=one)
        actor = replace(config.actor_rollout_ref, rollout=rollout)
        agents = parts.agents(replace(config, actor_rollout_ref=actor), parts.tokenizer, stack)
        if agents is not None:
            agents.pool.wait_ready()


def check_rewards(config: PPOConfig, parts: Assembly) -> None:
    """Check that the user's reward function loads and that reward models can encode the conversations. Raises ValueError."""
    if asks_rules(config.reward) and not config.reward.remote_urls:
        resolve(with_own_function(config.reward))
    for name, model in reward_models(config.reward).items():
        if model.path is not None:
            try:
                own_conversations(model, parts.tokenizer, config.data.apply_chat_template_kwargs)
            except ValueError as error:
                raise ValueError(f"{model_key(name, config.reward)}: {error}") from error


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A role's model.

    positions: max_position_embeddings of its config; None if absent or scaled by RoPE. shape: None if the memory model does not
    cover the architecture.
    """

    kind: str
    parameters: int
    positions: int | None
    shape: Shape | None


def measured(config: PPOConfig) -> dict[str, MeasuredModel]:
    """Models of all roles by configuration key, with parameters counted without allocating them."""
    found = {}
    for key, role in roles_of(config, has_critic=wants_critic(config)).items():
        model: ModelConfig
        head: Head
        if isinstance(role, ScoringModelConfig):
            model, head = engine_model(role), head_of(role)
        else:
            model, head = config.actor_rollout_ref.model, "lm"
            if role is config.critic:
                model, head = config.critic.model, "value"
        about = model_config(model, head)
        # On the meta device: parameters are counted without memory, so the dtype does not matter.
        body = empty_model(model, about, head, DTYPES["bfloat16"])
        parameters = sum(parameter.numel() for parameter in body.parameters())
        kind = f"{about.model_type}, {model.path}{'; a LoRA adapter alone is trained' if model.has_adapter else ''}"
        settings = about.get_text_config().to_dict()
        # With a scaling factor, max_position_embeddings is not the limit of the scaled model.
        stretched = "factor" in (settings.get("rope_parameters") or {})
        positions = None if stretched else settings.get("max_position_embeddings")
        found[key] = MeasuredModel(kind, parameters, positions, shape_of(about, parameters))
    return found


def model_lines(models: dict[str, MeasuredModel]) -> Iterator[str]:
    yield "models"
    for key, model in models.items():
        yield f"  {key}: {in_millions(model.parameters)} parameters ({model.kind})"


def work_lines(parts: Assembly) -> Iterator[str]:
    config, data = parts.config, parts.config.data
    n, batch = config.actor_rollout_ref.rollout.n, data.train_batch_size
    yield "data"
    for name, prompts in (("train_files", parts.data), ("val_files", parts.held_out)):
        yield f"  data.{name}: {len(prompts)} prompts of {prompts.n_rows} rows"
    yield "work"
    an_epoch, trainer = parts.order.steps_per_epoch, config.trainer
    why = "trainer.total_training_steps" if trainer.total_training_steps else counted(trainer.total_epochs, "epoch")
    yield f"  {counted(parts.total_steps, 'step')} ({why}); {an_epoch} an epoch"
    longest = data.max_prompt_length + data.max_response_length
    asked = f"{counted(batch, 'prompt')} x {counted(n, 'answer')} = {counted(batch * n, 'sequence')}"
    yield f"  a step: {asked} of {longest} tokens at most"
    learners = {"actor": (config.actor_rollout_ref.actor.ppo_mini_batch_size, parts.actor_update())}
    if parts.wants_critic:
        learners["critic"] = (config.critic.ppo_mini_batch_size, parts.critic_update())
    for name, (size, spec) in learners.items():
        updates = counted(spec.updates_a_step(batch), "update")
        yield f"  {name}: {updates} a step, of {counted(size, 'prompt')} = {counted(size * n, 'sequence')} each"
    for cut in cuts(config, parts.place, has_critic=parts.wants_critic):
        yield f"  {cut.key}.{cut.kind}*: micro-batches of {cut.tokens(longest)} tokens at most on a GPU"


def place_lines(config: PPOConfig, place: Placement) -> Iterator[str]:
    device, rollout = config.trainer.device, config.actor_rollout_ref.rollout
    yield "who sits where" + (" (trainer.device=cpu: a GPU is a process)" if device == "cpu" else "")
    for pool in place.pools:
        yield f"  {pool.in_words()}"
    for key, role in roles_of(config, has_critic=wants_critic(config)).items():
        pool = place.pool(name_of(key))
        ranks = counted(world_size(pool), "rank")
        yield f"  {key}: {role.strategy}, {ranks}, data parallel {data_parallel_size(role, pool)}"
    engines, size = world_size(place.pool("rollout")), engine_ranks(rollout)
    yield f"  rollout: {counted(engines // size, 'engine')} ({rollout.name}), each on {counted(size, 'GPU')}"


def staged_bytes(config: PPOConfig, place: Placement, models: dict[str, MeasuredModel]) -> float:
    """Bytes of host memory per node while a checkpoint is written in the background; 0 without it or for unknown models."""
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    if not (is_ever(config.trainer.save_freq) and config.trainer.checkpoint.async_save and shapes.keys() == models.keys()):
        return 0.0
    # Background saves of all roles overlap, so their copies add up.
    return sum(role.checkpoint() for role in memory_roles(config, place, shapes).values()) / config.trainer.nnodes


def snapshot_bytes(config: PPOConfig, place: Placement, models: dict[str, MeasuredModel]) -> float:
    """Bytes of host memory per node of the actor's weights at the last sync; 0 without them or for unknown models."""
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    if config.async_training.prox_logp != "snapshot" or shapes.keys() != models.keys():
        return 0.0
    return memory_roles(config, place, shapes)["actor_rollout_ref.actor"].snapshot() / place.pool("actor").nnodes


def written_lines(config: PPOConfig, run_dir: Path, resume: Checkpoint | None, staged: float) -> Iterator[str]:
    trainer = config.trainer
    yield f"what is written, into {run_dir}"
    if resume is not None:
        yield f"  resumes from step {resume.step}: {resume.path}"
    elif trainer.resume_mode == "auto" and trainer.checkpoint.remote_dir is not None:
        yield f"  resumes from the newest whole checkpoint of {trainer.checkpoint.remote_dir}, or starts anew"
    elif trainer.resume_mode == "resume_path":
        yield f"  resumes from {trainer.resume_from_path}, which is fetched first"
    else:
        yield "  starts anew"
    yield f"  each step: metrics.jsonl{''.join(f', {name}' for name in trainer.logger)}, report.html"
    if trainer.rollout_data_dir is not None:
        yield f"  each step's answers: {trainer.rollout_data_dir}"
    when = (["before the first step"] if trainer.val_before_train else []) + every(trainer.test_freq)
    yield f"  validation: {', '.join(when) or 'never (trainer.test_freq)'}"
    most = trainer.max_actor_ckpt_to_keep
    kept = f"; {'all' if most is None else f'the newest {most}'} kept" if is_repeated(trainer.save_freq) else ""
    yield f"  checkpoints: {', '.join(every(trainer.save_freq)) or 'never (trainer.save_freq)'}{kept}"
    if staged:
        yield f"  while one is written, its copy is in the host's memory: {staged / GB:.3g} GB on each node"
    if trainer.checkpoint.remote_dir is not None and is_ever(trainer.save_freq):
        yield f"  copies of them: {trainer.checkpoint.remote_dir}"


def every(frequency: int | Literal["end"]) -> list[str]:
    if frequency == "end":
        return ["after the last step"]
    return [f"every {frequency} steps" if frequency > 1 else "each step", "after the last"] if frequency > 0 else []


def memory_lines(config: PPOConfig, place: Placement, models: dict[str, MeasuredModel]) -> Iterator[str]:
    yield "memory of a worker (an estimate; rows as long as they may be; 1 GB is 10^9 bytes)"
    if unknown := sorted(key for key, model in models.items() if model.shape is None):
        yield f"  none: it is for dense decoders, and {', '.join(unknown)} is none"
    yield from (f"  {use.pool:<12}{use.phase:<26}{of_gpu(use)}" for use in uses_of(config, place, models))
    if kept := snapshot_bytes(config, place, models):
        yield f"  in the host's memory: {kept / GB:.3g} GB on each of the actor's nodes (async_training.prox_logp=snapshot)"
    if config.trainer.device == "cuda" and torch.cuda.device_count() < config.trainer.n_gpus_per_node:
        wanted = f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
        yield f"  {wanted}: this machine has {torch.cuda.device_count()} CUDA devices, so the run must start on another"


def uses_of(config: PPOConfig, place: Placement, models: dict[str, MeasuredModel]) -> list[Use]:
    """Estimated memory use of each phase; empty if the memory model does not cover a model."""
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    # Colocated roles are added up: without one of the models every sum would be too small.
    return list(estimate(config, place, shapes, room_of(config, place))) if shapes.keys() == models.keys() else []


def doubts(config: PPOConfig, place: Placement, models: dict[str, MeasuredModel], asked: Sampling) -> Iterator[str]:
    """Warnings: settings that are valid but will likely fail or slow the run down."""
    if not (asked.ignore_eos or end_tokens(asked, config.actor_rollout_ref.model)):
        yield f"no answer can end by itself (alarms.end_token): {NO_END_TOKEN}"
    data, positions, room = config.data, models["actor_rollout_ref.actor"].positions, room_of(config, place)
    longest = data.max_prompt_length + data.max_response_length
    if positions is not None and positions < longest:
        row = f"data.max_prompt_length + data.max_response_length = {longest} tokens"
        yield f"rows longer than the model knows: {row}, and its config.json has {positions} positions (max_position_embeddings)"
    fullest = max(uses_of(config, place, models), key=lambda use: use.bytes or 0.0, default=None)
    if room is not None and fullest is not None and (fullest.bytes or 0.0) > room:
        yield f"more than there is: {fullest.phase} in pool {fullest.pool}, and a worker here has {room / GB:.4g} GB"
    staged, kept = staged_bytes(config, place, models), snapshot_bytes(config, place, models)
    if staged and staged > (usable := usable_memory(host_memory()) - kept):
        copies = f"copies of {staged / GB:.3g} GB, and this host's memory has room for {max(usable, 0.0) / GB:.3g} GB"
        yield f"training would wait for each checkpoint to be written: {copies}"


def room_of(config: PPOConfig, place: Placement) -> float | None:
    """Bytes available to one worker on this machine: GPU memory, or its part of host memory; None without a GPU."""
    if config.trainer.device == "cpu":
        return psutil.virtual_memory().total / (place.n_gpus // config.trainer.nnodes)
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def of_gpu(use: Use) -> str:
    if use.bytes is None:
        return f"{use.share:g} of the GPU, and what stays resident"
    return f"{use.bytes / GB:>8.3g} GB" + (f", and at most {use.cached / GB:.3g} GB of torch's cache" if use.cached else "")


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def in_millions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def write(config: PPOConfig, run_dir: Path) -> Path:
    """Write the configuration as the run would write it; returns the path."""
    name = DRY_RUN_CONFIG if (run_dir / METRICS).exists() else CONFIG
    with owner_only(config.trainer.private):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_config(run_dir, asdict(config), name)
    return run_dir / name
