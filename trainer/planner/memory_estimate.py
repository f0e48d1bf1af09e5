"""Estimate the memory of a worker in each phase of a step. Bytes on one GPU; 1 GB is 10^9 bytes.

FSDP roles use trainer/planner/memory_model.py. Megatron roles are assumed to be split evenly, with layers recomputed. In each
phase one role works while the others of its pool keep only what is not offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

from configs.schema.common import Dtype, FSDPConfig, MegatronConfig, ModelConfig, ShardedConfig
from configs.schema.placement import Placement, Pool
from configs.schema.ppo import PPOConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.validation.batches import cuts, name_of, roles_of, scoring_cut
from configs.validation.parallel import data_parallel_size
from configs.validation.rollout import ROLLOUT, world_size
from trainer.planner.memory_model import Setting, Shape, gathering, head_chunk, reserved, resident, scoring, training

BYTES: dict[Dtype, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
WORK = {"actor": "log-probs", "ref": "log-probs", "critic": "values"}
ASLEEP = 1.8e9  # upper limit of what a sleeping vLLM or SGLang engine keeps on the GPU (docs/performance.md)
# What a process takes outside torch's allocator, measured on an H200 with torch 2.11 (docs/performance.md).
RUNTIME = 0.8e9  # CUDA context, kernels, cuBLAS workspaces
PROCESS = 0.31e9  # CPU: Python with torch, transformers and Ray, without files (scripts/bench/planning.py memory)
NCCL = 1.2e9  # communicators of a worker with peers: a main group and one more, after their first collectives


@dataclass(frozen=True, slots=True)
class Role:
    """A model role on its workers.

    learns, forwards: tokens per micro-batch in a train step and in a forward pass; None: the role has no such phase. several: a
    train step has more than one micro-batch. model: None for a reward model, which has no adapter. seen, cuda: see Setting.
    """

    config: ShardedConfig
    model: ModelConfig | None
    shape: Shape
    pool: Pool
    learns: int | None
    forwards: int | None
    several: bool = True
    seen: float = 1.0
    cuda: bool = True

    @property
    def adapter(self) -> float:
        """Bytes of a LoRA adapter on all linear layers, with its gradients and moments, in float32; 0 without one."""
        if self.model is None or not self.model.has_adapter:
            return 0.0
        shape = self.shape
        widths = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys) + 3 * (shape.hidden + shape.intermediate)
        # Weights, gradients and two moments at 4 bytes each.
        return 16.0 * shape.layers * self.model.lora_rank * widths

    @property
    def setting(self) -> Setting:
        """Settings for the memory model of FSDP."""
        fsdp, model = self.config.fsdp_config, self.model
        return Setting(
            gpus=fsdp.fsdp_size if fsdp.fsdp_size > 0 else world_size(self.pool),
            sp=fsdp.ulysses_sequence_parallel_size,
            kept=BYTES[fsdp.model_dtype],
            compute=BYTES[fsdp.dtype],
            # Under LoRA the base is frozen, and ``adapter`` counts what is trained.
            trained=self.learns is not None and not self.adapter,
            optimizer_offload=fsdp.optimizer_offload,
            several=self.several,
            no_sync=fsdp.use_no_sync_for_gradient_accumulation,
            offload=model is not None and model.enable_activation_offload,
            pieces=model.tiled_mlp.num_shards if model is not None and model.tiled_mlp.enabled else 1,
            seen=self.seen,
            recompute=model is None or model.enable_gradient_checkpointing,
            cuda=self.cuda,
            fused=self.cuda if fsdp.use_torch_compile is None else fsdp.use_torch_compile,
        )

    def checkpoint(self) -> float:
        """Bytes that a checkpoint of the role contains, over all GPUs: parameters and moments, under LoRA the adapter's only."""
        if self.learns is None:
            return 0.0
        sharding = self.config.sharding
        kept = BYTES[sharding.model_dtype] if isinstance(sharding, FSDPConfig) else 4  # Megatron's optimizer has them in float32
        # 3 of the 4 numbers per weight that ``adapter`` counts: gradients are not saved.
        return 0.75 * self.adapter if self.adapter else 3.0 * kept * self.shape.parameters

    def snapshot(self) -> float:
        """Bytes that a copy of the trained weights takes, over all GPUs."""
        if self.learns is None:
            return 0.0
        sharding = self.config.sharding
        kept = BYTES[sharding.model_dtype if isinstance(sharding, FSDPConfig) else sharding.dtype]
        # One of the 4 numbers per weight that ``adapter`` counts.
        return 0.25 * self.adapter if self.adapter else float(kept * self.shape.parameters)

    def at_rest(self) -> float:
        """Bytes that stay on the GPU while other roles work."""
        sharding = self.config.sharding
        if isinstance(sharding, FSDPConfig):
            lying = resident(self.shape, self.setting)
            return lying["moments"] + (0.0 if sharding.param_offload else lying["parameters"]) + self.adapter
        weights, gradients, optimizer = self._megatron(sharding)
        kept = ((weights, sharding.param_offload), (gradients, sharding.grad_offload), (optimizer, sharding.optimizer_offload))
        # A role that does not learn has weights only.
        return sum(part for part, offloaded in (kept if self.learns is not None else kept[:1]) if not offloaded)

    def in_update(self) -> float:
        """Bytes at the peak of a train step."""
        assert self.learns is not None, "a role that learns"
        sharding, shape = self.config.sharding, self.shape
        if isinstance(sharding, FSDPConfig):
            return sum(training(shape, self.setting, self.learns).values()) + self.adapter
        # Layer inputs: a pipeline rank holds 1 / pp of the layers, for pp micro-batches, so pp cancels.
        inputs = self.learns * 2 * shape.hidden * shape.layers
        at_work = self.learns * (12 * shape.intermediate + 26 * shape.hidden + 8 * shape.queries)
        tp = sharding.tensor_model_parallel_size
        return sum(self._megatron(sharding)) + (inputs + at_work + head_chunk(shape, Setting())) / tp

    def cached(self, *, learnt: bool) -> float:
        """Bytes that torch's cache keeps on CUDA for FSDP's own streams after the role's forward pass, and after its update if it
        has ``learnt``, until it is emptied before the engine wakes. Memory of one stream is not reused in another.
        """
        if not isinstance(self.config.sharding, FSDPConfig):
            return 0.0
        found = gathering(self.shape, self.setting)
        if learnt and self.learns is not None:
            used = sum(training(self.shape, self.setting, self.learns).values())
            found += reserved(self.shape, self.setting, self.learns) - used
        return found

    def in_forward(self) -> float:
        """Bytes at the peak of a forward pass for log-probs, values or scores."""
        assert self.forwards is not None, "a role that is asked"
        sharding, shape = self.config.sharding, self.shape
        if isinstance(sharding, FSDPConfig):
            return sum(scoring(shape, self.setting, self.forwards).values()) + self.adapter
        tp = sharding.tensor_model_parallel_size
        states = self.forwards * (6 * shape.intermediate + 8 * shape.hidden)
        return self.at_rest() + (states + head_chunk(shape, Setting())) / tp

    def _megatron(self, cut: MegatronConfig) -> tuple[float, float, float]:
        """Bytes on the largest stage: (weights in ``dtype``, float32 gradients, the optimizer's float32 weights and moments)."""
        parameters = self.shape.stage_parameters(cut.pipeline_model_parallel_size) / cut.tensor_model_parallel_size
        # The distributed optimizer divides its state over the data-parallel copies of the model.
        copies = world_size(self.pool) // cut.model_parallel_size if cut.use_distributed_optimizer else 1
        return BYTES[cut.dtype] * parameters, 4 * parameters, 12 * parameters / copies


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes in use on a GPU of a pool in a phase, including resident tensors of idle roles.

    bytes: None if the GPU's size is not known; the engine then takes ``share`` of it. cached: what torch's cache keeps besides,
    for FSDP's other streams; torch gives it up where memory would run out.
    """

    pool: str
    phase: str
    bytes: float | None
    share: float = 0.0
    cached: float = 0.0


def memory_roles(config: PPOConfig, place: Placement, shapes: Mapping[str, Shape]) -> dict[str, Role]:
    """The run's model roles by configuration key. shapes: by the same keys, with the critic's if there is one."""
    models, data = config.actor_rollout_ref, config.data
    has_critic = "critic" in shapes
    longest, n = data.max_prompt_length + data.max_response_length, models.rollout.n
    held = {(cut.key, cut.kind): cut.tokens(longest) for cut in cuts(config, place, has_critic=has_critic)}
    asked = {"actor_rollout_ref.actor": (ROLLOUT, "log_prob_"), "actor_rollout_ref.ref": ("actor_rollout_ref.ref", "log_prob_")}
    mini_batches = {"actor_rollout_ref.actor": models.actor.ppo_mini_batch_size, "critic": config.critic.ppo_mini_batch_size}
    found = {}
    for key, role in roles_of(config, has_critic=has_critic).items():
        pool = place.pool(name_of(key))
        shares = data_parallel_size(role, pool)
        # Engines compute a prompt once for its responses in a micro-batch (workers/engine/shared_prefixes.py).
        once = role.strategy == "fsdp" and not isinstance(role, ScoringModelConfig)

        def tokens_of(groups: int, shares: int = shares, once: bool = once) -> int:
            """Tokens that a rank computes of ``groups`` prompts with n responses each; no micro-batch is larger."""
            rows = -(-groups * n // shares)
            return (-(-rows // n) if once else rows) * data.max_prompt_length + rows * data.max_response_length

        most = tokens_of(data.train_batch_size)
        learns: int | None = None
        several = False
        model: ModelConfig | None = None
        if key in mini_batches:
            mine = tokens_of(mini_batches[key])
            learns, several = min(held[key, "ppo_"], mine), held[key, "ppo_"] < mine
        seen = 1.0
        if isinstance(role, ScoringModelConfig):
            forwards = scoring_cut(key, role, pool).tokens(longest)
        else:
            forwards = held[asked.get(key, (key, "forward_"))]
            model = config.critic.model if role is config.critic else models.model
            seen = keys_per_token(data.max_prompt_length, data.max_response_length, n, max(learns or 0, min(forwards, most)))
        on_cuda = config.trainer.device == "cuda"
        found[key] = Role(role, model, shapes[key], pool, learns, min(forwards, most), several, seen, on_cuda)
    return found


def keys_per_token(prompt: int, response: int, n: int, tokens: int) -> float:
    """Keys that attention gathers per computed token of a micro-batch of ``tokens`` with rows of full length that share prompts.

    prompt, response, n: largest number of tokens of each, and responses to a prompt.
    """
    together = min(n, max(1, (tokens - prompt) // response))
    return (prompt + together * (prompt + response)) / (prompt + together * response) if together > 1 else 1.0


def estimate(config: PPOConfig, place: Placement, shapes: Mapping[str, Shape], gpu_bytes: float | None) -> Iterator[Use]:
    """Memory use of each pool in each phase of a step. gpu_bytes: size of one GPU; None: not known."""
    roles, models = memory_roles(config, place, shapes), config.actor_rollout_ref
    engine, on_cuda = models.rollout, config.trainer.device == "cuda"
    for pool in place.pools:
        here = {key: role for key, role in roles.items() if role.pool is pool}
        resting = {key: role.at_rest() for key, role in here.items()}
        rests = sum(resting.values())
        rests += PROCESS if not on_cuda else RUNTIME + (NCCL if world_size(pool) > 1 else 0.0)
        asleep = 0.0
        if "rollout" in pool.roles:
            if engine.name == "embedded":
                actor = roles["actor_rollout_ref.actor"]
                own = rests + embedded_bytes(config, pool, actor.shape)
                yield Use(pool.name, "answers", own)
                if arriving := arriving_bytes(config, pool, actor):
                    yield Use(pool.name, "sync", own + arriving)
            else:
                # gpu_memory_utilization: vLLM takes a share of the whole GPU, SGLang of what is free when it starts.
                free = gpu_bytes if engine.name == "vllm" or gpu_bytes is None else gpu_bytes - rests
                taken = None if free is None else rests + engine.gpu_memory_utilization * free
                yield Use(pool.name, "answers", taken, engine.gpu_memory_utilization)
                asleep = ASLEEP if on_cuda else 0.0
        # While a role works, the others of its pool keep their resident tensors, and the engine what it keeps asleep.
        for key, role in here.items():
            others = rests - resting[key] + asleep
            name = "critic" if key == "critic" else key.rpartition(".")[2]
            yield Use(pool.name, f"{name}: {WORK.get(name, 'scores')}", others + role.in_forward())
            if role.learns is not None:
                # The critic learns before the actor. All roles have been gathered by then: for log-probs and values.
                done = (key, "critic")
                cached = sum(other.cached(learnt=of in done) for of, other in here.items()) if on_cuda else 0.0
                yield Use(pool.name, f"{name}: update", others + role.in_update(), cached=cached)


def shape_of(config: PretrainedConfig, parameters: int) -> Shape | None:
    """Shape of a model from its configuration; None if it is not a decoder that the memory model covers.

    parameters: actual number of parameters, compared with the shape's own count within 2 %.
    """
    settings = config.get_text_config().to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if not all(isinstance(settings.get(name), int) for name in names):
        return None
    settings |= {"num_key_value_heads": settings.get("num_key_value_heads") or settings["num_attention_heads"]}
    settings |= {"head_dim": settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]}
    # Tied or untied is decided by the parameters themselves: the variant with the nearer count is used.
    shapes = [Shape.of(settings | {"tie_word_embeddings": tied}) for tied in (False, True)]
    nearest = min(shapes, key=lambda shape: abs(shape.parameters - parameters))
    return nearest if abs(nearest.parameters - parameters) < 0.02 * parameters else None


def uses_live_weights(config: PPOConfig, pool: Pool) -> bool:
    """Whether the embedded engine uses the trainer's own tensors: see TrainEngine.live_weights and Rollout.share_weights."""
    models = config.actor_rollout_ref
    alone = world_size(pool) == 1 and "actor" in pool.roles and models.actor.strategy == "fsdp" and not models.model.has_adapter
    return alone and models.actor.fsdp_config.model_dtype == models.rollout.dtype


def arriving_bytes(config: PPOConfig, pool: Pool, actor: Role) -> float:
    """Bytes of new weights on their way to the embedded engine, besides its own.

    From other processes a bucket; in the trainer's own one tensor at a time, gathered and as the engine wants it.
    """
    rollout, shape = config.actor_rollout_ref.rollout, actor.shape
    size = BYTES[rollout.dtype]
    if "actor" not in pool.roles:
        return min(2.0**20 * rollout.update_weights_bucket_megabytes, size * shape.parameters)
    largest = max(shape.vocabulary, shape.intermediate) * shape.hidden
    return 0.0 if uses_live_weights(config, pool) else float((actor.setting.kept + size) * largest)


def embedded_bytes(config: PPOConfig, pool: Pool, shape: Shape) -> float:
    """Bytes of the embedded engine: weights, unless shared with the trainer, and the KV cache of concurrent responses."""
    models, data = config.actor_rollout_ref, config.data
    rollout = models.rollout
    size, longest = BYTES[rollout.dtype], data.max_prompt_length + data.max_response_length
    weights = 0 if uses_live_weights(config, pool) else size * shape.parameters
    rows = min(rollout.max_num_seqs, -(-data.train_batch_size * rollout.n // world_size(pool)))
    return float(weights + rows * longest * shape.layers * 2 * shape.keys * size)
