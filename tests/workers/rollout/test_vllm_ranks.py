"""vLLM beside FSDP2 shards on two ranks, on Ray: one engine over both, and an engine on each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.toy import VOCABULARY, toy_batch
from tests.workers.rollout.engines import ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_hosts import ACTOR_LOSS, CPU_BUILD, LENGTH, actor_spec, greedy_error, make_small
from trainer.remote import RemoteModel, RemoteRollout
from workers.batch import Batch
from workers.controller.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.metric import plain_numbers
from workers.plan import Limits
from workers.rollout.base import Completion, Sampling
from workers.rollout.verification import TURNS

pytestmark = CPU_BUILD

TEMPERATURE, GROUP = 0.7, 2


class Run:
    """An actor and a rollout on two ranks."""

    def __init__(self, backend: RayBackend, path: Path, tensor_model_parallel_size: int) -> None:
        self.size, self.path = tensor_model_parallel_size, path
        make_small(path)
        group = backend.start_group(
            "hosts", ResourcePool((2,), "cpu", "pool"), "tests.workers.rollout.vllm_hosts:SpoilingHost", "cpu"
        )
        rollout = spec_of(
            str(path), name="vllm", max_model_len=LENGTH, slots=16, tensor_model_parallel_size=tensor_model_parallel_size
        )
        limits = Limits(max_tokens=LENGTH)
        self.sync_spoiled = lambda name, place: group.call("sync_spoiled", name, place).result()
        self.actor = RemoteModel(
            group, "actor", actor_spec(rollout.model), ACTOR_LOSS, forward_limits=limits, train_limits=limits, attention_cost=0.0
        )
        self.rollout = RemoteRollout(group, rollout, source="actor")
        self.close = lambda: group.call("close").result()

    def answers(self, *, greedy: bool) -> tuple[Batch, Batch]:
        """Prompts, each twice in a row, and what came."""
        rows = [torch.tensor(prompt) for prompt in ragged_prompts(5, longest=150) for _ in range(GROUP)]
        prompts = Batch(
            torch.tensor([len(row) for row in rows]),
            tokens={"input_ids": torch.cat(rows)},
            rows={"seed": torch.arange(len(rows)) + 40, "greedy": torch.full((len(rows),), greedy)},
        )
        sampling = Sampling(TEMPERATURE, -1, 1.0, 24, stop_token_ids=(1,))
        return prompts, self.rollout.generate(prompts, sampling, GROUP)

    def trainers_log_probs(self, prompts: Batch, answers: Batch) -> torch.Tensor:
        pairs = list(zip(prompts.split_rows("input_ids"), answers.split_rows("input_ids"), strict=True))
        whole = Batch(
            prompts.lengths + answers.lengths,
            tokens={
                "input_ids": torch.cat([torch.cat(pair) for pair in pairs]),
                "response_mask": torch.cat([torch.cat([torch.zeros_like(p), torch.ones_like(a)]) for p, a in pairs]).bool(),
            },
            meta={"temperature": TEMPERATURE},
        )
        log_probs = self.actor.forward(whole, ["log_probs"]).tokens["log_probs"]
        return log_probs[whole.tokens["response_mask"]]


@pytest.fixture(scope="module", params=[2, 1], ids=["one engine over two ranks", "two engines"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        run = Run(backend, folder / "model", request.param)
        yield run
        run.close()


def test_three_rounds_of_training_sleep_and_sync(run: Run, tmp_path: Path) -> None:
    """Greedy answers are those of the model that the trainer exports; sampled log-probs are the trainer's."""
    for version in range(3):
        if version:
            run.actor.train_step(toy_batch([9, 5, 12, 7], seed=version), ["advantages", "old_log_probs"])
        run.rollout.sync_weights(version)
        prompts, answers = run.answers(greedy=True)
        sampled_prompts, sampled = run.answers(greedy=False)
        theirs = run.trainers_log_probs(sampled_prompts, sampled)
        assert (theirs - sampled.tokens["rollout_log_probs"]).abs().max() < 1e-4
        assert len({tuple(row.tolist()) for row in sampled.split_rows("input_ids")}) > len(sampled) / 2
        assert set(answers.rows["weight_version"].tolist()) == {version}
        run.actor.export_hf(str(tmp_path / str(version)))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(version)).eval()
        columns = [batch.split_rows(name) for batch, name in
                   ((prompts, "input_ids"), (answers, "input_ids"), (answers, "rollout_log_probs"))]  # fmt: skip
        for i, (prompt, answer, log_probs) in enumerate(zip(*columns, strict=True)):
            completion = Completion(i, tuple(answer.tolist()), tuple(log_probs.tolist()), "stop", version)
            assert greedy_error(model, request(i, prompt.tolist(), temperature=0.0), completion) < 1e-4


def test_the_mesh_is_the_rollouts_own(run: Run) -> None:
    wanted = {1: ((0, 1), (0, 1)), 2: ((0, 0), (0,))}[run.size]
    assert (run.rollout.mesh.shard_of_rank, run.rollout.mesh.answers) == wanted
    assert run.actor.mesh.shard_of_rank == (0, 1), "the trainer's is another"


def test_a_seed_gives_the_same_answers_again(run: Run) -> None:
    run.rollout.sync_weights(9)
    first, second = (run.answers(greedy=False)[1] for _ in range(2))
    assert torch.equal(first.tokens["input_ids"], second.tokens["input_ids"])
    assert first.tokens["input_ids"].max() < VOCABULARY


SPOILED = {  # (tensor, a number of it, which of two ranks has it when they are one engine): cut by rows, by columns, not at all
    "embed_tokens, first rows": ("model.embed_tokens.weight", 0, [0]),
    "lm_head, last row": ("lm_head.weight", -1, [1]),
    "v_proj, second head": ("model.layers.1.self_attn.v_proj.weight", -1, [1]),
    "k_proj, bias": ("model.layers.0.self_attn.k_proj.bias", 0, [0]),
    "up_proj": ("model.layers.0.mlp.up_proj.weight", -1, [1]),
    "o_proj, first columns": ("model.layers.0.self_attn.o_proj.weight", 0, [0]),
    "down_proj, last columns": ("model.layers.1.mlp.down_proj.weight", -1, [1]),
    "norm": ("model.layers.1.input_layernorm.weight", 3, [0, 1]),
}


def test_a_number_that_is_off_is_found_on_the_ranks_that_have_it(run: Run) -> None:
    for name, place, ranks in SPOILED.values():
        said = run.sync_spoiled(name, place)
        for rank in range(2):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            has_it = run.size == 1 or rank in ranks
            assert said[rank].startswith(line) if has_it else said[rank] == "", said
    run.rollout.sync_weights(10)


def test_what_was_verified_is_counted_over_all_ranks(run: Run) -> None:
    """64 samples read all that the ranks hold, what one of them alone has once."""
    read = sum(plain_numbers(run.rollout.sync_weights(11 + i))["rollout/verified_bytes"] for i in range(TURNS))
    weights = AutoModelForCausalLM.from_pretrained(run.path)
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    total = sum(weight.nbytes for weight in weights.parameters())
    assert read == (2 * total if run.size == 1 else total + replicated)
