import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema.common import TokenizedModelConfig
from tests.tiny import model_config
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.chat import can_be_sent, load_tokenizer, stop_token_ids
from workers.controller.rpc import pack, unpack


def model(path: Path, tokenizer_path: str | None = None) -> TokenizedModelConfig:
    return model_config(str(path), tokenizer_path=tokenizer_path)


def test_load_tokenizer_takes_the_other_path_and_names_a_missing_one(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "there")
    assert len(load_tokenizer(model(tmp_path / "no_model", str(tmp_path / "there")))) == 258
    with pytest.raises(ValueError, match=r"no tokenizer at .*elsewhere") as error:
        load_tokenizer(model(tmp_path / "elsewhere"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("of_model", "eos_token", "stops"),
    [(None, "<eos>", (1,)), (5, "<eos>", (1, 5)), ([7, 1], "<eos>", (1, 7)), (5, None, (5,))],
)
def test_stop_tokens_are_those_of_tokenizer_and_generation_config(
    tmp_path: Path, of_model: Any, eos_token: str | None, stops: tuple[int, ...]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = eos_token
    if of_model is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": of_model}))
    assert stop_token_ids(tokenizer, model(tmp_path)) == stops


def test_model_without_any_eos_raises(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no response could end"):
        stop_token_ids(tokenizer, model(tmp_path))


def test_another_chat_template_as_text_or_in_a_file(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    for asked in (file.read_text(), f"@{file}"):
        tokenizer = load_tokenizer(model_config(str(tmp_path), custom_chat_template=asked))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<hello>"
    with pytest.raises(ValueError, match=r"custom_chat_template=@nowhere\.jinja: no such file; after @, name a file"):
        load_tokenizer(model_config(str(tmp_path), custom_chat_template="@nowhere.jinja"))


def test_tokenizer_that_is_sent_decodes_alike() -> None:
    tokenizer = byte_tokenizer()
    assert can_be_sent(tokenizer)
    sent, ids = unpack(pack(tokenizer)), [list(range(len(tokenizer)))]
    for special in (False, True):
        assert sent.batch_decode(ids, skip_special_tokens=special) == tokenizer.batch_decode(ids, skip_special_tokens=special)
    tokenizer.__class__ = type("OwnTokenizer", (type(tokenizer),), {"__module__": "transformers_modules.own"})
    assert not can_be_sent(tokenizer), "no worker could import its class"
