import hashlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import trainer.data.dataset
import trainer.data.encoding
from data_preprocess.writer import rl_row, write
from tests.trainer.data.tokenizers import byte_tokenizer, data_config
from trainer.data.dataset import Prompt, PromptDataset, PromptStream
from trainer.data.order import DataOrder
from trainer.data.processes import PART

TOKENIZER = byte_tokenizer()
EXTRA = len("<user><a>")  # tokens added by the template


def rows(lengths: list[int], source: str = "sort_digits") -> list[dict[str, Any]]:
    """Prompts with these numbers of tokens, template included; the ground truth is the row index."""
    return [
        rl_row(data_source=source, prompt="x" * (n - EXTRA), ability="", ground_truth=str(i), split="train", index=i)
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def dataset(
        *files: list[dict[str, Any]], max_samples: int = -1, seed: int = 0, scored: bool = True, **changes: Any
    ) -> PromptDataset:
        paths = [str(write(file, str(tmp_path), f"part{i}")) for i, file in enumerate(files)]
        return PromptDataset(paths, TOKENIZER, data_config(**changes), max_samples=max_samples, seed=seed, scored=scored)

    return dataset


def test_prompt_has_all_fields_of_the_row(make: Any) -> None:
    data = make(rows([12, 13]), rows([14], "openai/gsm8k"))
    assert len(data) == 3 and data.data_sources == {"sort_digits", "openai/gsm8k"} and data.notices == ()
    text = "<user>xxxxx<a>"
    assert data[2] == Prompt(
        uid=2,
        prompt_ids=tuple(TOKENIZER(text)["input_ids"]),
        text=text,
        data_source="openai/gsm8k",
        ground_truth="0",
        extra_info={"split": "train", "index": 0},
        messages=data.row(2)["prompt"],
    )
    assert all(type(token) is int for token in data[0].prompt_ids)


def test_columns_of_other_names_and_no_extra_info(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "plain", "source": "s", "reward_model": {"ground_truth": ["a", "b"]}}\n')
    data = PromptDataset([str(file)], TOKENIZER, data_config(prompt_key="q", reward_fn_key="source"), max_samples=-1, seed=0)
    assert (data[0].text, data[0].data_source, data[0].ground_truth, data[0].extra_info) == ("plain", "s", ["a", "b"], {})


def test_a_text_in_place_of_a_struct_is_refused_without_scores_too(make: Any) -> None:
    with pytest.raises(ValueError, match=r"part0\.parquet: column 'reward_model' is string; it must be a struct"):
        make([row | {"reward_model": "rule"} for row in rows([12])], scored=False)


@pytest.mark.parametrize("source", [["sort_digits"], {"name": "sort_digits"}])
def test_a_data_source_that_is_no_text_is_named(source: Any, make: Any) -> None:
    other = [row | {"data_source": source} for row in rows([12])]
    with pytest.raises(ValueError, match=r"part1\.parquet, row 0: data_source is .*, a (list|dict); it must be a text or null"):
        make(rows([12]), other)


def test_the_prompt_may_be_a_field_of_a_struct(make: Any) -> None:
    given = [row | {"nested": {"prompt": row["prompt"]}} for row in rows([12, 13])]
    nested, plain = make(given, prompt_key="nested.prompt"), make(given)
    assert [nested[i] for i in range(2)] == [plain[i] for i in range(2)]


def test_template_settings_reach_the_template(make: Any) -> None:
    assert make(rows([12]), apply_chat_template_kwargs={"tail": "!"})[0].text == "<user>xxx<a>!"


def test_too_long_prompts_are_an_error_with_count_and_rows(make: Any) -> None:
    with pytest.raises(ValueError) as error:
        make(rows([20, 21]), rows([20, 20, 22]), max_prompt_length=20)
    text = str(error.value)
    assert "2 of 5 prompts are longer than data.max_prompt_length=20" in text and "part0.parquet, row 1" in text
    assert "data.filter_overlong_prompts=true" in text and "\n" not in text


def test_filter_drops_and_counts_prompts_and_keeps_uids(make: Any) -> None:
    data = make(rows([20, 21, 20]), rows([22, 20]), max_prompt_length=20, filter_overlong_prompts=True)
    assert [data[i].uid for i in range(len(data))] == [0, 2, 4]
    assert [data[i].ground_truth for i in range(3)] == ["0", "2", "1"]
    assert all(len(data[i].prompt_ids) == 20 for i in range(3))
    assert data.notices == ("2 of 5 prompts are longer than data.max_prompt_length=20 tokens and are dropped",)
    with pytest.raises(ValueError, match=r"2 of 2 prompts .* leaves no prompt; raise data.max_prompt_length"):
        make(rows([21, 22]), max_prompt_length=20, filter_overlong_prompts=True)


@pytest.mark.parametrize(("how", "kept"), [("left", "345<a>"), ("right", "<user>"), ("middle", "<us<a>")])
def test_truncation(make: Any, how: str, kept: str) -> None:
    row = rl_row(data_source="s", prompt="12345", ability="", ground_truth="", split="train", index=0)
    data = make([row], max_prompt_length=6, truncation=how)
    assert TOKENIZER.decode(data[0].prompt_ids) == kept
    assert data[0].text == "<user>12345<a>"
    notice = f"1 of 1 prompts are longer than data.max_prompt_length=6 tokens and are truncated (data.truncation={how})"
    assert data.notices == (notice,)


def test_max_samples_selects_by_seed_or_takes_the_first_rows(make: Any) -> None:
    def uids(**kwargs: Any) -> list[int]:
        data = make(rows([12] * 30), rows([12] * 20), max_samples=10, **kwargs)
        return [data[i].uid for i in range(len(data))]

    assert uids(seed=1) == uids(seed=1) != uids(seed=2)
    assert len(set(uids(seed=1))) == 10 and uids(seed=1) != list(range(10))
    assert uids(shuffle=False) == list(range(10))
    with pytest.raises(ValueError, match="max_samples=0 leaves no prompt"):
        make(rows([12]), max_samples=0)


def test_uids_do_not_depend_on_samples_or_filter(make: Any) -> None:
    lengths = [20 + i % 2 for i in range(40)]
    everything = {p.uid: p for p in iter_prompts(make(rows(lengths)))}
    some = list(iter_prompts(make(rows(lengths), max_samples=20, max_prompt_length=20, filter_overlong_prompts=True)))
    assert 0 < len(some) < 20 and all(everything[prompt.uid] == prompt for prompt in some)


def iter_prompts(data: PromptDataset) -> list[Prompt]:
    return [data[i] for i in range(len(data))]


def test_empty_prompts_and_missing_columns_are_named(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x", "data_source": "s", "reward_model": {"ground_truth": "1"}}\n' * 2)
    for column in ("prompt", "data_source", "reward_model"):
        file.write_text(file.read_text().replace(column, "other"))
        with pytest.raises(ValueError, match=rf"rows\.jsonl: no column '{column}'; it has "):
            PromptDataset([str(file)], TOKENIZER, data_config(), max_samples=-1, seed=0)
        file.write_text(file.read_text().replace("other", column))
    file.write_text(file.read_text().replace('"x"', '""', 1))
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 0: the prompt is empty"):
        PromptDataset([str(file)], TOKENIZER, data_config(), max_samples=-1, seed=0)


def test_a_prompt_that_cannot_be_rendered_is_named_with_its_row(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl", '{"prompt": %s, "data_source": "s", "reward_model": {"ground_truth": "1"}}\n'
    for prompt, message in (("null", "the prompt is None, neither a text nor a list"), ("7", "the prompt is 7, neither")):
        file.write_text(row % '"x"' * 2 + row % prompt)
        with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2: {message}"):
            PromptDataset([str(file)], TOKENIZER, data_config(), max_samples=-1, seed=0)


def test_rows_without_a_ground_truth_are_counted_unless_none_has_one(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl", '{"prompt": "x", "data_source": "s", "reward_model": {"ground_truth": %s}}\n'
    for truths, notices in (
        ("1 null 2 null", [f"2 of 4 rows have no ground truth, the first is {file}, row 1"]),
        ("1 2", []),
        ("null null", []),
    ):
        file.write_text("".join(row % truth for truth in truths.split()))
        assert PromptDataset([str(file)], TOKENIZER, data_config(), max_samples=-1, seed=0).notices == tuple(notices)


def test_message_that_is_no_text_raises_with_its_row(make: Any) -> None:
    given = rows([12, 13])
    given[1]["prompt"][0]["content"] = None
    with pytest.raises(ValueError, match=r"^\S+part0\S+, row 1: message 0: the content is a NoneType; only text is supported$"):
        make(given)


def test_token_outside_the_vocabulary_raises_with_its_row(make: Any) -> None:
    data = make(rows([3, 5, 4]))
    largest = [max(prompt.prompt_ids) for prompt in iter_prompts(data)]
    data.check_tokens(max(largest) + 1)
    first = next(uid for uid, token in enumerate(largest) if token == max(largest))
    with pytest.raises(ValueError, match=rf"row {first}: the prompt contains token {max(largest)}, .* has {max(largest)}; set"):
        data.check_tokens(max(largest))


def test_tokenising_in_processes_equals_one_process(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [20 + i % 3 for i in range(PART + 100)]
    settings: dict[str, Any] = {"max_prompt_length": 21, "filter_overlong_prompts": True}
    alone = make(rows(lengths), **settings)
    monkeypatch.setattr(trainer.data.encoding, "encode", None)  # the children import their own
    pooled = make(rows(lengths), filter_overlong_prompts_workers=2, **settings)
    assert iter_prompts(pooled) == iter_prompts(alone) and pooled.notices == alone.notices != ()


PROMPTS = [Prompt(uid, (uid,), str(uid), "math", None, {}, str(uid)) for uid in range(7)]


def stream_of_prompts() -> PromptStream:
    return PromptStream(cast(Any, PROMPTS), DataOrder(n=7, batch_size=2, seed=3, shuffle=True))


def test_rounds_are_the_batches_of_the_order() -> None:
    stream = stream_of_prompts()
    rounds = [[prompt.uid for prompt in stream.draw()] for _ in range(6)]
    assert rounds == [stream.order.batch(i) for i in range(6)]


def test_epoch_is_that_of_the_next_prompt() -> None:
    stream, epochs = stream_of_prompts(), []
    for _ in range(7):
        epochs.append(stream.epoch)
        stream.draw()
    assert stream.rounds_per_epoch == 3 and epochs == [0, 0, 0, 1, 1, 1, 2]


def test_resumed_stream_continues() -> None:
    stream, resumed = stream_of_prompts(), stream_of_prompts()
    for _ in range(4):
        stream.draw()
    resumed.load(stream.state())
    assert [resumed.draw() for _ in range(4)] == [stream.draw() for _ in range(4)]


def test_single_prompts_are_those_of_the_rounds_with_consecutive_ordinals() -> None:
    rounds, singles = stream_of_prompts(), stream_of_prompts()
    drawn = [prompt for _ in range(6) for prompt in rounds.draw()]
    epochs = []
    for prompt in drawn:
        epochs.append(singles.epoch)
        assert singles.draw_one() == prompt
    assert [prompt.ordinal for prompt in drawn] == list(range(12)) and epochs == [0] * 6 + [1] * 6
    assert len({prompt.uid for prompt in drawn}) < 12, "a row of the data comes again in the second epoch"
    assert singles.state() == rounds.state() == {"drawn": 6}
    assert singles.draw() == rounds.draw()


def test_round_cannot_be_drawn_after_a_part_of_it() -> None:
    stream = stream_of_prompts()
    stream.draw_one()
    with pytest.raises(RuntimeError, match="round 0: 1 of 2 prompts were taken with draw_one"):
        stream.draw()


@pytest.mark.parametrize("taken", range(7))
def test_stream_resumes_within_a_round(taken: int) -> None:
    stream, resumed = stream_of_prompts(), stream_of_prompts()
    resumed.draw_one()
    for _ in range(taken):
        stream.draw_one()
    state = stream.state()
    assert state == {"drawn": taken // 2} | ({"taken": 1} if taken % 2 else {})
    resumed.load(state)
    assert [resumed.draw_one() for _ in range(5)] == [stream.draw_one() for _ in range(5)]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every data set counts as large. Returns the directory of the cached sizes."""
    monkeypatch.setattr("trainer.data.dataset.MANY", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/tandem/prompt_sizes"


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts that are tokenised by calls for a whole data set."""
    calls: list[int] = []
    encode_all = trainer.data.dataset.encode_all

    def counted(tokenizer: Any, prompts: Any, *args: Any) -> Any:
        calls.append(len(prompts))
        return encode_all(tokenizer, prompts, *args)

    monkeypatch.setattr("trainer.data.dataset.encode_all", counted)
    return calls


@pytest.mark.parametrize(
    "changes",
    [{"filter_overlong_prompts": True}, {"truncation": "left"}, {"truncation": "middle"}, {"max_prompt_length": 40}],
)
def test_a_large_data_set_is_tokenised_once_and_its_prompts_are_the_same(
    changes: dict[str, Any], large: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, given = count_calls(monkeypatch), (rows([12, 33, 14]), rows([13, 40]))
    settings = {"max_prompt_length": 20} | changes
    first = make(*given, **settings)
    again = make(*given, **settings)
    assert calls == [5] and (first.is_lazy, again.is_lazy) == (False, True)
    assert [first[i] for i in range(len(first))] == [again[i] for i in range(len(again))]
    assert len(again) == (3 if "filter_overlong_prompts" in changes else 5)
    (file,) = large.iterdir()
    assert again.notices == (f"5 prompts are tokenised as they are drawn; their lengths are from {file}", *first.notices)
    largest = max(max(first[i].prompt_ids) for i in range(len(first)))
    for data in (first, again):
        data.check_tokens(largest + 1)
        with pytest.raises(ValueError, match=f"contains token {largest}, "):
            data.check_tokens(largest)


def test_a_token_outside_the_vocabulary_is_found_behind_dropped_rows(large: Path, make: Any) -> None:
    given = rows([33, 12, 12])
    given[2]["prompt"][0]["content"] = "~"
    for lazy in (False, True):
        data = make(given, max_prompt_length=20, filter_overlong_prompts=True)
        assert data.is_lazy == lazy and len(data) == 2
        with pytest.raises(ValueError, match=r"row 2: the prompt contains token"):
            data.check_tokens(max(data[1].prompt_ids))
        data.check_tokens(max(data[1].prompt_ids) + 1)


def test_sizes_of_other_content_rows_template_or_tokenizer_are_not_used(
    large: Path, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, given = count_calls(monkeypatch), rows([12, 13, 14, 15])
    make(given)
    longer = byte_tokenizer()
    longer.chat_template = "<long>" + str(longer.chat_template)
    other = byte_tokenizer()
    other.add_tokens(["xxxx"])
    cases: list[tuple[Any, list[dict[str, Any]], dict[str, Any]]] = [
        (TOKENIZER, rows([12, 13, 14, 16]), {}),
        (TOKENIZER, given, {"max_samples": 3}),
        (TOKENIZER, given, {"apply_chat_template_kwargs": {"add_generation_prompt": False}}),
        (longer, given, {}),
        (other, given, {}),
    ]
    for tokenizer, content, changes in cases:
        path, chosen = str(write(content, str(tmp_path), "part0")), {"max_samples": -1} | changes
        samples = chosen.pop("max_samples")
        calls.clear()
        data = PromptDataset([path], tokenizer, data_config(**chosen), max_samples=samples, seed=0)
        assert calls and not data.is_lazy
        again = PromptDataset([path], tokenizer, data_config(**chosen), max_samples=samples, seed=0)
        assert again.is_lazy and [again[i] for i in range(len(data))] == [data[i] for i in range(len(data))]
    assert len([*large.iterdir()]) == 1 + len(cases)


@pytest.mark.parametrize("damage", ["half", "empty", "byte", "of another size"])
def test_damaged_sizes_are_computed_again(damage: str, large: Path, make: Any) -> None:
    first = make(rows([12, 13, 14]))
    (file,) = large.iterdir()
    whole = file.read_bytes()
    at = whole.index(np.int32(13).tobytes())
    broken = {"half": whole[: len(whole) // 2], "empty": b"", "byte": whole[:at] + b"\x07" + whole[at + 1 :]}
    if damage in broken:
        file.write_bytes(broken[damage])
    else:
        file.write_bytes(hashlib.sha256(bytes(16)).digest() + bytes(16))
    again = make(rows([12, 13, 14]))
    assert not again.is_lazy and file.read_bytes() == whole
    assert [again[i] for i in range(3)] == [first[i] for i in range(3)]


def test_a_template_with_the_date_and_a_cache_that_cannot_be_written(
    large: Path, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dated = byte_tokenizer()
    dated.chat_template = "{% set today = strftime_now %}" + str(dated.chat_template)
    path = str(write(rows([12, 13]), str(tmp_path), "dated"))
    PromptDataset([path], dated, data_config(), max_samples=-1, seed=0)
    assert not large.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(make(rows([12, 13]))) == 2
    assert "prompts are tokenised again by the next run" in capsys.readouterr().err
