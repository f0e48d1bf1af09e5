"""A reward model behind a server gives the scores of transformers, one conversation at a time."""

from pathlib import Path

import pytest
import torch

from data_preprocess import tiny_model
from tests.reward_models import make_reward_model, plain_scores, tokenizer_of
from tests.serving import serving
from tests.trainer.rewards.config import reward_config
from trainer import main_serve_reward
from trainer.rewards.conversations import tokenizer_fingerprint
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.scoring import Response

USER = [{"role": "user", "content": "2 + 2?"}]
ANSWERS = [
    Response("", "four", None, {}, True, "template of the policy: ", "four</s>", USER),
    Response("", "five, I gue", None, {}, False, "template of the policy: ", "", USER),
    Response("", "4", None, {}, True, "2 + 2 = ", "4</s>", "2 + 2 = "),  # a plain text
    Response("", "four", None, {}, True, "<user>2 + 2?<eos>\n<assistant>", "four<eos>"),  # as OpenRLHF sends it
    Response("", "x", None, {}, True, messages=[{"content": "no role"}]),
    Response("", "", None, {}, True),
    Response("", "x", None, {}, True, messages=[{"content": "no role"}], whole=True),
    Response("", "x", None, {}, True, messages=["no message"], whole=True),
    Response("", "", None, {}, False, messages=""),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model", seed=3, own_words=True, moments=(0.25, 0.5))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, which has no head for scores."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_model.main([f"--save_dir={folder}"])
    return folder


def scores(url: str, answers: list[Response] = ANSWERS) -> list[float | str]:
    """Scores, or error messages."""
    found = RemoteRewards([url], reward_config(remote={"batch_size": 4}).remote).score(answers)
    return [score.value if score.value is not None else str(score.error) for score in found]


def by_hand(path: str) -> torch.Tensor:
    """Expected scores of the first four."""
    tokenizer = tokenizer_of(path)
    texts = [
        "<user>2 + 2?<eos>\n<assistant>four<eos>",
        "<user>2 + 2?<eos>\n<assistant>five, I gue",
        "2 + 2 = 4<eos>",
        "<user>2 + 2?<eos>\n<assistant>four<eos>",
    ]
    return plain_scores(path, [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts])


def test_scores_equal_transformers(path: str) -> None:
    with serving(f"model.path={path}") as url:
        found = scores(url)
    assert found[:4] == pytest.approx(by_hand(path).tolist(), abs=1e-5)
    assert len(set(found[:3])) == 3 and found[0] == pytest.approx(found[3], abs=1e-6)
    assert isinstance(found[4], str) and "role" in found[4] and found[5] == "there is no token to score"
    assert found[6] == found[4] and isinstance(found[7], str) and found[8] == found[5]


def test_a_whole_conversation_is_read_up_to_its_last_turn(path: str) -> None:
    turns = [
        *USER,
        {"role": "assistant", "content": "five"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    cut = turns[:2]
    answers = [
        Response("", "fiveno4", None, {}, True, messages=[*turns, {"role": "user", "content": "too late"}], whole=True),
        Response("", "five", None, {}, False, messages=cut, whole=True),
        Response("", "", None, {}, False, messages=USER, whole=True),
    ]
    with serving(f"model.path={path}") as url:
        found = scores(url, answers)
    tokenizer = tokenizer_of(path)
    texts = ["<user>2 + 2?<eos>\n<assistant>five<eos>\n<user>no<eos>\n<assistant>4<eos>", "<user>2 + 2?<eos>\n<assistant>five"]
    rows = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert found[:2] == pytest.approx(plain_scores(path, rows).tolist(), abs=1e-5)
    assert found[2] == "the conversation has no turn of the model"


def test_tokens_of_the_same_tokenizer_are_not_reencoded(path: str) -> None:
    """A sampled response may consist of tokens that the tokenizer would not choose."""
    words, row = tokenizer_fingerprint(tokenizer_of(path)), [40, 41, 42]
    own, foreign = [ANSWERS[0]._replace(ids=row, tokenizer_id=words) for words in (words, "of another")]
    broken = [own._replace(ids=ids) for ids in ([40, -1], [[40]], ["x"], [40, 9999])]
    with serving(f"model.path={path}") as url:
        found = scores(url, [own, foreign, *broken])
    assert found[:2] == pytest.approx([float(plain_scores(path, [torch.tensor(row)])), float(by_hand(path)[0])], abs=1e-5)
    assert found[2] == found[3] == "token_ids has something that is no list of numbers from 0"
    assert all(isinstance(why, str) for why in found[4:]) and "9999" in str(found[5])


def test_scores_are_normalized_by_the_statistics_of_the_model_directory(path: str) -> None:
    with serving(f"model.path={path}", "model.normalize=stored") as url:
        assert scores(url, ANSWERS[:4]) == pytest.approx(((by_hand(path) - 0.25) / 0.5).tolist(), abs=1e-5)


def test_too_long_conversation_fails_alone_or_is_truncated(path: str) -> None:
    longer = [Response("", "four", None, {}, True, messages="x" * 300), ANSWERS[0]]
    with serving(f"model.path={path}", "model.max_length=128") as url:
        output, other = scores(url, longer)
        assert isinstance(output, str) and "305 tokens, and the model reads 128 at most" in output and isinstance(other, float)
    with serving(f"model.path={path}", "model.max_length=128", "model.truncation=left") as url:
        found = RemoteRewards([url], reward_config().remote).score(longer)
        assert [score.extra for score in found] == [{"model_cut": 1.0}, {"model_cut": 0.0}]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.path={path}", "reward.scorer=gsm8k"],
            r"model\.path=\S+: a server returns a single score; remove reward\.scorer",
        ),
        (["model.path={path}", "model.tokenizer_path={base}/nowhere"], r"model: no tokenizer at \S+/nowhere"),
        (
            ["model.path={path}", "model.max_length=99999"],
            r"model\.forward_max_token_len_per_gpu=32768: .*max_length = 99999",
        ),
        (["model.path={base}"], r"model: model\.path=\S+: .* has no score head"),
    ],
)
def test_invalid_configuration_is_a_one_line_error(
    overrides: list[str], line: str, path: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["server.port=0", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/run"]
    typed = [override.format(path=path, base=base) for override in overrides]
    assert main_serve_reward.PROGRAM([*words, *typed]) == 2
    output = capsys.readouterr().err.splitlines()
    with pytest.raises(ValueError, match=f"error: {line}"):
        raise ValueError(output[0])
    assert len(output) == 1
