"""Complete runs whose responses are conversations with a calculator; the model has random weights, the engine is embedded.

A parser of the task's own makes a call of almost every response, so that conversations have several turns without training.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import trainer.rollout.remote_rollout as remote_rollout
from data_preprocess import calculator, tiny_model
from tests.reward_models import make_reward_model, plain_scores
from tests.runs import repeatable, run_ppo
from tests.threads import use_threads
from tests.trainer.ppo.test_loop_stops import events_of
from tests.workers.rollout.vllm_workers import CPU_BUILD

PARSER = '''
def parse(text, tools):
    """A response is a call, unless its length is a multiple of 4."""
    if len(text) % 4 == 0:
        return text, []
    return "", [{"name": "calculator", "arguments": {"expression": "1" + "".join(filter(str.isdigit, text))}}]
'''
FAILING = '''
from trainer.agents.tools import tool


@tool
def calculator(expression: str) -> str:
    """Result of an expression.

    Args:
        expression: what is calculated
    """
    raise ConnectionError("connection refused")
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 5 + extra_info["num_turns"]
"""
ENVIRONMENT = '''
from trainer.agents.environments import Environment


class Count(Environment):
    """Replies with the number of characters; a session has at most three turns. Pure, or it begins anew after a resume."""

    pure = True

    def reset(self, task):
        self.turns = 0
        return [{"role": "user", "content": "12+" + str(len(task.prompt[0]["content"]))}]

    def step(self, message):
        self.turns += 1
        text = message["content"] or ""
        return [{"role": "user", "content": str(len(text))}], len(text) % 3 - 0.5, self.turns == 3 or len(text) % 4 == 0, {}


class Forgetful(Count):
    pure = False
'''
PROGRAM = '''
import asyncio, random
from openai import AsyncOpenAI, OpenAI


def line(base_url, api_key, task):
    """Turns one after the other, until one has a length that is a multiple of 4."""
    client, messages = OpenAI(base_url=base_url, api_key=api_key), [*task.prompt]
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0]
        text = reply.message.content or ""
        if len(text) % 4 == 0 or reply.finish_reason == "length":
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(len(text))}]
    return len(text) % 5


async def tree(base_url, api_key, task):
    """A turn, two branches of it at the same time, and a call with the answers of both; the reward function scores it."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(*messages):
            reply = await client.chat.completions.create(model="policy", messages=[*messages], max_tokens=8)
            return {"role": "assistant", "content": reply.choices[0].message.content or ""}

        first = await ask(*task.prompt)
        both = await asyncio.gather(*(ask(*task.prompt, first, {"role": "user", "content": one}) for one in ("1", "2")))
        await ask(*task.prompt, {"role": "user", "content": str([len(one["content"]) for one in both])[1:-1].replace(", ", "+")})


async def wide(base_url, api_key, task):
    """Four calls at the same time, in any order, of which two are equal; then one with the lengths of their answers."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(text, n=1):
            message = {"role": "user", "content": text}
            reply = await client.chat.completions.create(model="policy", messages=[message], n=n, max_tokens=24)
            return text, [len(one.message.content or "") for one in reply.choices]

        calls = [ask("1"), ask("2"), ask("3", n=2)]
        random.shuffle(calls)
        found = sorted(await asyncio.gather(*calls))
        await ask("+".join(str(n) for _, lengths in found for n in lengths)[:12])
    return None
'''
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
RUN = (
    "algorithm=grpo", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2",
    "data.max_prompt_length=16", "data.max_response_length=40", "trainer.total_training_steps=4", "trainer.save_freq=1",
    f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.max_assistant_turns=3", "actor_rollout_ref.rollout.agent.num_workers=1",
)  # fmt: skip
CORRECTED = ("algorithm.rollout_correction.rollout_is=token",)
AHEAD = (
    *CORRECTED, "trainer.backend=ray", "placement=split", "trainer.n_gpus_per_node=2", "async_training.mode=async",
    "async_training.max_staleness=2",
)  # fmt: skip
MODES = {
    "synchronous": (),
    "filter_groups": ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"),
    "partial": (*CORRECTED, "async_training.mode=partial", "async_training.max_age=2"),
    "one_step_off": (*AHEAD[:-2], "async_training.mode=one_step_off"),
    "async": AHEAD,
}  # fmt: skip


SIZES = ("--tools", "--alphabet=0123456789+", "--num_attention_heads=3", "--num_key_value_heads=1")
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of size 32: vLLM has no smaller ones on CPU."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator.main([f"--local_save_dir={folder}", "--train_size=16", "--test_size=4", "--sft_size=0"])
    tiny_model.main([f"--save_dir={folder / 'base'}", *SIZES])
    make_reward_model(folder / "judge", seed=1, made=SIZES)
    make_reward_model(folder / "other", seed=2, own_words=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "parser.py").write_text(PARSER)
    (folder / "environment.py").write_text(ENVIRONMENT)
    (folder / "program.py").write_text(PROGRAM)
    return folder


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


def run(task: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    tools = (f"{MULTI_TURN}.function_tool_path={calculator_file()}", f"{MULTI_TURN}.format={task / 'parser.py'}:parse")
    return run_ppo(task, folder / "run", *RUN, *tools, f"trainer.rollout_data_dir={folder / 'rollouts'}", *overrides)


def calculator_file() -> str:
    from trainer.agents.native import calculator as module

    return module.__file__


def dump(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "rollouts" / f"step_{step}.safetensors")


def turns(mask: Tensor) -> int:
    """Number of stretches of trained tokens."""
    return int((mask.diff(prepend=torch.zeros(1)) == 1).sum())


def test_tool_whose_server_has_ended_is_an_event(task: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(FAILING)
    steps = run(task, tmp_path, f"{MULTI_TURN}.function_tool_path={tmp_path / 'tools.py'}")
    assert all(step["agents/tool/calculator/errors"] == step["agents/tool/calculator/calls"] > 0 for step in steps)
    text = "every call of calculator has failed for 2 steps: see the replies in the conversations of report.html"
    assert (2, "tool", text) in events_of(tmp_path / "run")


def test_turns_are_trained_as_they_were_sampled(task: Path, tmp_path: Path) -> None:
    """Log-probs of the trainer, which sees whole conversations, are those of the engine, which saw one call at a time."""
    steps = run(task, tmp_path)
    assert max(step["training/rollout_log_probs_diff_max"] for step in steps) < 1e-5
    assert steps[0]["agents/turns/max"] == 3 and min(step["agents/turns"] for step in steps) > 1
    rows = dump(tmp_path, 1)
    starts, lengths = rows["rows.prompt_length"].tolist(), rows["lengths"].tolist()
    masks = [mask[start:] for mask, start in zip(rows["tokens.response_mask"].split(lengths), starts, strict=True)]
    assert rows["tokens.response_mask"].sum() == sum(mask.sum() for mask in masks), "prompts are not trained"
    assert {turns(mask) for mask in masks} >= {1, 3}
    assert max(map(len, masks)) <= 40, "turns and results together"
    observed = sum(int((mask == 0).sum()) for mask in masks)
    assert observed == round(steps[0]["agents/tokens/observed"] * len(masks)) > 0


def test_conversations_end_at_the_length_of_the_engine(task: Path, tmp_path: Path) -> None:
    """The engine refuses a longer request, which would end the run."""
    run(task, tmp_path, "actor_rollout_ref.rollout.max_model_len=36", "trainer.total_training_steps=1")
    assert dump(tmp_path, 1)["lengths"].max() == 36


@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        ("async", ()),
        *(pytest.param(mode, (), marks=pytest.mark.soak) for mode in ("synchronous", "filter_groups", "partial", "one_step_off")),
        *(
            pytest.param(mode, ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"), marks=marks)
            for mode, marks in (("partial", [CPU_BUILD, pytest.mark.soak]), ("synchronous", [CPU_BUILD, pytest.mark.soak]))
        ),
    ],
)
def test_run_resumes_bitwise_in_mid_conversation(
    mode: str, engine: tuple[str, ...], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode in ("one_step_off", "async"):
        use_threads(monkeypatch)
    overrides = (*MODES[mode], *engine)
    whole = run(task, tmp_path / "whole", *overrides)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'run' / 'global_step_2'}")
    assert repeatable(run(task, tmp_path / "resumed", *overrides, *path)) == repeatable(whole[2:])
    first, second = dump(tmp_path / "whole", 4), dump(tmp_path / "resumed", 4)
    assert first.keys() == second.keys() and len(first) > 10
    assert all(torch.equal(first[name], second[name]) for name in first if name != "json")  # which has the seconds of tools
    if mode in ("partial", "async"):
        versions = [dump(tmp_path / "whole", step)["tokens.weight_version"] for step in (2, 3, 4)]
        assert any(len(of_step[of_step >= 0].unique()) > 1 for of_step in versions), "conversations over several steps"
        gaps = [step.get("training/rollout_log_probs_diff_max", 0.0) for step in whole]
        assert max(gaps) < 1e-5, "of tokens that the present weights sampled"


@pytest.mark.soak
def test_lora_trains_conversations_exactly_and_resumes(task: Path, tmp_path: Path) -> None:
    """The engine has the adapter's weights in step 2, in which log-probs are equal again. Validation has conversations too."""
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_training_steps=2")
    val = "actor_rollout_ref.rollout.val_kwargs"
    lora += ("trainer.test_freq=2", f"{val}.do_sample=true", f"{val}.temperature=1.0")
    whole = run(task, tmp_path / "whole", *lora)
    shown = [json.loads(line) for line in (tmp_path / "whole" / "run" / "samples.jsonl").read_text().splitlines()]
    assert max(sample["score"] for sample in shown) > 4 + 2, "more turns than one"
    assert max(step["training/rollout_log_probs_diff_max"] for step in whole) < 1e-5 and whole[0]["agents/turns/max"] == 3
    first, second = (dump(tmp_path / "whole", step)["tokens.weight_version"].max() for step in (1, 2))
    assert first < second and whole[0]["actor/grad_norm"] > 0
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'run' / 'global_step_1'}")
    assert repeatable(run(task, tmp_path / "resumed", *lora, *path)) == repeatable(whole[1:])


NO_RULE = ("reward.custom_reward_function.path=null", "reward.scorer=none")
APART = (
    "trainer.backend=ray", "trainer.n_gpus_per_node=2", "placement=custom", "placement.roles.reward=judges",
    *(f"placement.pools.{pool}={{nodes: 1, gpus: 1, fraction: 1.0}}" for pool in ("main", "judges")),
    *(f"placement.roles.{role}=main" for role in ("actor", "ref", "critic", "rollout")),
)  # fmt: skip


@pytest.mark.parametrize("places", [(), pytest.param(APART, marks=pytest.mark.soak)], ids=["colocated", "apart"])
def test_reward_model_scores_the_rows_of_conversations(
    places: tuple[str, ...], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with transformers alone: the model reads the tokens that were sampled and observed."""
    if places:
        use_threads(monkeypatch)
    steps = run(task, tmp_path, *NO_RULE, *places, f"reward.models.judge.path={task / 'judge'}", "trainer.total_training_steps=2")
    for step in (1, 2):
        rows = dump(tmp_path, step)
        ids = [row.long() for row in rows["tokens.input_ids"].split(rows["lengths"].tolist())]
        assert torch.allclose(rows["rows.score"], plain_scores(str(task / "judge"), ids), atol=1e-4)
    assert max(step["training/rollout_log_probs_diff_max"] for step in steps) < 1e-5 and steps[0]["agents/turns/max"] == 3


def test_reward_model_with_its_own_words_scores_the_messages_of_an_environment(task: Path, tmp_path: Path) -> None:
    """The environment's reward has the weight of a rule."""
    environment = (f"{MULTI_TURN}.environment={task / 'environment.py'}:Count", "reward.weight=0", *NO_RULE)
    own = ("trainer.total_training_steps=2", f"reward.models.other.path={task / 'other'}")
    steps = run_ppo(task, tmp_path / "run", *RUN, *environment, *own, f"trainer.rollout_data_dir={tmp_path / 'rollouts'}")
    scores = dump(tmp_path, 1)["rows.score"]
    assert steps[0]["reward/failed"] == 0 and len(scores.unique()) > 4
    assert abs(float(scores.mean()) - steps[0]["reward/other/mean"]) < 1e-5, "the model alone"


@pytest.mark.parametrize("name", ["Count", "Forgetful"])
def test_run_with_an_environment_trains_its_rewards_and_resumes(name: str, task: Path, tmp_path: Path) -> None:
    options = (*RUN, *MODES["partial"], f"{MULTI_TURN}.environment={task / 'environment.py'}:{name}")

    def run_environment(folder: Path, *overrides: str) -> list[dict[str, float]]:
        return run_ppo(task, folder / "run", *options, f"trainer.rollout_data_dir={folder / 'rollouts'}", *overrides)

    whole = run_environment(tmp_path / "whole")
    assert max(step["training/rollout_log_probs_diff_max"] for step in whole if "rollout/staleness/0" in step) < 1e-5
    assert whole[0]["agents/turns/max"] == 3 and whole[0]["agents/tokens/observed"] > 0
    scores = dump(tmp_path / "whole", 1)["rows.score"]
    assert all((score * 2) % 1 == 0 and -1.5 <= score <= 4.5 for score in scores.tolist()), "sums of rewards of turns"
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'run' / 'global_step_2'}")
    resumed = run_environment(tmp_path / "resumed", *path)
    if name == "Count":
        assert repeatable(resumed) == repeatable(whole[2:])
    assert any("agents/restarted" in step for step in resumed) == (name == "Forgetful")
    assert not any("agents/restarted" in step for step in whole)


@pytest.mark.parametrize(
    ("mode", "program"),
    [
        ("partial", "wide"),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("partial", "line"), ("async", "line"), ("async", "wide"))),
    ],
)
def test_run_with_a_program_trains_what_it_was_served_and_resumes_bitwise(
    mode: str, program: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "async":
        use_threads(monkeypatch)
    options = (*RUN, *MODES[mode], f"actor_rollout_ref.rollout.agent.program={task / 'program.py'}:{program}")
    turns = {"line": 3, "wide": 5}[program]
    options += (f"{MULTI_TURN}.max_assistant_turns={turns}",)

    def run_program(folder: Path, *overrides: str) -> list[dict[str, float]]:
        return run_ppo(task, folder / "run", *options, f"trainer.rollout_data_dir={folder / 'rollouts'}", *overrides)

    whole = run_program(tmp_path / "whole")
    gaps = [step["training/rollout_log_probs_diff_max"] for step in whole if "training/rollout_log_probs_diff_max" in step]
    assert gaps and max(gaps) < 1e-5 and whole[0]["agents/turns/max"] == turns
    saved = [load_file(path) for path in (tmp_path / "whole" / "run" / "global_step_2").rglob("*.safetensors")]
    (n_calls,) = (arrays["session_calls"] for arrays in saved if "session_calls" in arrays)
    assert (n_calls.max() > 1) == (program == "wide"), "several calls of a session in the checkpoint"
    assert not any(name in step for step in whole for name in ("agents/errors", "agents/restarted"))
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'run' / 'global_step_2'}")
    resumed = run_program(tmp_path / "resumed", *path)
    assert repeatable(resumed) == repeatable(whole[2:])
    first, second = dump(tmp_path / "whole", 4), dump(tmp_path / "resumed", 4)
    assert all(torch.equal(first[name], second[name]) for name in first if name != "json")
    versions = [dump(tmp_path / "whole", step)["tokens.weight_version"] for step in (2, 3, 4)]
    assert any(len(of_step[of_step >= 0].unique()) > 1 for of_step in versions), "conversations over several steps"


def test_run_with_branches_at_the_same_time_repeats_bitwise(task: Path, tmp_path: Path) -> None:
    program = f"actor_rollout_ref.rollout.agent.program={task / 'program.py'}:tree"
    options = (*RUN, "trainer.save_freq=-1", "trainer.total_training_steps=2", f"{MULTI_TURN}.max_assistant_turns=4", program)

    def run_program(folder: Path) -> list[dict[str, float]]:
        return run_ppo(task, folder / "run", *options, f"trainer.rollout_data_dir={folder / 'rollouts'}")

    first, second = run_program(tmp_path / "first"), run_program(tmp_path / "second")
    assert repeatable(first) == repeatable(second)
    rows = dump(tmp_path / "first", 1)
    assert len(rows["lengths"]) >= 3 * 8, "both branches, and the last call; a truncated turn is not continued"
    assert max(step["training/rollout_log_probs_diff_max"] for step in first) < 1e-5
    assert first[0]["agents/turns"] == 4
