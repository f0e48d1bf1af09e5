"""A language model on the embedded engine as judge."""

import asyncio
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.base.keys import ConfigError
from configs.validation.programs import check_serve_reward
from data_preprocess import tiny_model
from tests.reward_models import CHAT
from tests.serving import serve_config
from trainer.cluster.watchdog import Watchdog
from trainer.rewards.scoring import Response, Score
from trainer.serving.engine_judge import start_judge
from trainer.serving.request_queue import ServerStopping
from trainer.serving.reward_server import ScoreAll, check_answers, name_of

REPLY = "Score:1"


def make_judge(path: Path, *, reply: str | None = None) -> str:
    """Random weights; with ``reply`` (different letters) the next token depends on the last one only, and the model writes it."""
    tiny_model.main([f"--save_dir={path}", "--bytes", "--no-tie_word_embeddings"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    if reply is not None:
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            letters = [*tokenizer(">" + reply)["input_ids"], tokenizer.eos_token_id]
            model.lm_head.weight.zero_()
            for before, after in pairwise(letters):
                model.lm_head.weight[after] = model.model.embed_tokens.weight[before] * 1e3
        model.save_pretrained(path)
    return str(path)


def words(path: str, *overrides: str) -> list[str]:
    return [
        "judge_engine.enable=true", f"judge_engine.model.path={path}", "judge_engine.rollout.dtype=float32",
        "judge_engine.max_prompt_length=64", "reward.judge.max_tokens=12", "reward.judge.prompt='Q: {question} A: {answer}'",
        *overrides,
    ]  # fmt: skip


def opened(path: str, run_dir: Path, stack: ExitStack, *overrides: str) -> ScoreAll:
    config = serve_config(*words(path, f"trainer.default_local_dir={run_dir}", *overrides))
    assert check_serve_reward(config) == [] and name_of(config) == f"{path} as a judge"
    check_answers(config, [Response("no such source", "", None, {}, True)])
    served, stopped = start_judge(config, Watchdog(asdict(config.timeouts), run_dir), stack), Event()
    working = Thread(target=served.engine.work, args=(lambda: not stopped.is_set(),), daemon=True)
    loop = stack.enter_context(asyncio.Runner())
    working.start()
    stack.callback(working.join)
    stack.callback(stopped.set)
    return lambda answers: loop.run(served.scores(answers))


def answer(text: str, prompt: str = "", **extra: str) -> Response:
    return Response("", text, None, extra, True, prompt)


def test_score_in_the_reply_is_the_score_of_the_response(tmp_path: Path) -> None:
    path = make_judge(tmp_path / "judge", reply=REPLY)
    with ExitStack() as stack:
        score = opened(path, tmp_path, stack, "reward.judge.max_score=4")
        found = score([answer("x", question="1+1"), answer("long " * 20, question="1+1"), answer("y", "2+2")])
    assert [one.value for one in found] == [0.25, None, 0.25]
    assert found[1].error is not None and "tokens, judge_engine.max_prompt_length is 64" in found[1].error


@torch.no_grad()
def test_judge_reads_the_prompt_with_question_and_response(tmp_path: Path) -> None:
    """The reply equals that of transformers token by token; as it contains no score, the reward has failed."""
    path = make_judge(tmp_path / "judge")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    plain = []
    for question, text in (("1+1", "2"), ("of the prompt", "3")):
        ids = tokenizer(f"<user>Q: {question} A: {text}<eos>\n<assistant>")["input_ids"]
        message: list[int] = []
        while len(message) < 12 and tokenizer.eos_token_id not in message:
            message.append(int(model(torch.tensor([ids + message])).logits[0, -1].argmax()))
        plain.append(tokenizer.decode([token for token in message if token != tokenizer.eos_token_id]))
    with ExitStack() as stack:
        score = opened(path, tmp_path, stack)
        asked = [answer("2", "not this", question="1+1"), answer("3", "of the prompt")]
        found = score(asked)
        assert score(asked[:1]) == found[:1], "a single repeated request has the same reply"
    assert found == [Score(None, {}, f"JudgeError: the judge's reply has no `Score: X`: {reply!r}") for reply in plain]


def test_a_response_that_has_no_prompt_fails_alone(tmp_path: Path) -> None:
    """A null question is none: in a parquet file all rows have the fields that one of them has."""
    with ExitStack() as stack:
        score = opened(make_judge(tmp_path / "judge", reply="Score: 1"), tmp_path, stack, "reward.judge.max_score=1")
        null = answer("y", "2+2")._replace(extra_info={"question": None})
        found = score([answer("x", question="1+1"), null, answer("\ud800", "1+1"), answer("z", "")])
    assert [one.value for one in found] == [1.0, 1.0, None, 1.0] and found[2].error


def test_reply_has_no_stop_token(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (found,) = opened(make_judge(tmp_path / "judge", reply="nope"), tmp_path, stack)([answer("x", "1+1")])
    assert found.error == "JudgeError: the judge's reply has no `Score: X`: 'nope'"


def test_seed_of_a_sampled_reply_depends_on_the_request(tmp_path: Path) -> None:
    # All tokens have the same probability after any prompt, so that equal seeds give equal replies.
    model = AutoModelForCausalLM.from_pretrained(make_judge(tmp_path / "judge"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "judge")
    with ExitStack() as stack:
        score = opened(str(tmp_path / "judge"), tmp_path, stack, "reward.judge.temperature=1")
        one, two = score([answer("2", "1+1"), answer("3", "1+1")])
        assert [one] == score([answer("2", "1+1")]) and one.error != two.error
        greedy = tmp_path / "greedy"
    with ExitStack() as stack:
        assert opened(str(tmp_path / "judge"), greedy, stack)([answer("2", "1+1")]) != [one]


def test_requests_are_refused_when_the_engine_has_stopped(tmp_path: Path) -> None:
    config = serve_config(*words(make_judge(tmp_path / "judge"), f"trainer.default_local_dir={tmp_path}"))
    with ExitStack() as stack, asyncio.Runner() as loop:
        served = start_judge(config, Watchdog(asdict(config.timeouts), tmp_path), stack)

        async def asked() -> list[Score]:
            waiting = asyncio.create_task(served.scores([answer("x", "1+1")]))
            while not served.engine.unfinished:
                await asyncio.sleep(0)
            served.engine.work(lambda: False)
            return await waiting

        with pytest.raises(ServerStopping):  # a request that waits
            loop.run(asked())
        with pytest.raises(ServerStopping):  # a later one
            loop.run(served.scores([answer("x", "1+1")]))


@pytest.mark.parametrize(
    ("override", "output"),
    [
        (
            "reward.scorer=math",
            "judge_engine.enable=true: a server returns a single score, but reward.scorer=math also computes one;",
        ),
        (
            "judge_engine.rollout.max_model_len=70",
            "judge_engine.rollout.max_model_len=70: less than judge_engine.max_prompt",
        ),
        (
            "judge_engine.rollout={name: vllm, tensor_model_parallel_size: 2, dtype: float32}",
            "judge_engine.rollout.tensor_model_parallel_size=2: does not divide 1 workers",
        ),
    ],
)
def test_incompatible_keys_are_refused(override: str, output: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_serve_reward(serve_config(*words("x"), override))
    assert str(caught.value).startswith(output)
