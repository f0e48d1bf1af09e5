import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_preprocess import tiny_model
from data_preprocess.tiny_model import character_tokenizer
from tests.tiny import model_config
from trainer.data.chat import load_tokenizer, stop_token_ids

SMALL = ["--hidden_size", "16", "--intermediate_size", "32", "--num_hidden_layers", "1"]
EVERY_BYTE = character_tokenizer(None)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_directory_loads_with_the_auto_classes(tmp_path: Path, architecture: str) -> None:
    tiny_model.main(["--save_dir", str(tmp_path), "--architecture", architecture, *SMALL])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == architecture and model.config.hidden_size == 16 and model.config.num_hidden_layers == 1
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings == 11 + 2  # pad and eos
    ids = tokenizer("502913=")["input_ids"]
    assert ids == character_tokenizer("0123456789=")("502913=")["input_ids"] and len(set(ids)) == 7
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "502913="
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1="}], tokenize=False, add_generation_prompt=True) == "1="
    assert model(torch.tensor([ids])).logits.shape == (1, 7, 13)
    config = model_config(str(tmp_path))
    assert stop_token_ids(load_tokenizer(config), config) == (tokenizer.eos_token_id,) != (tokenizer.pad_token_id,)


def test_the_quick_starts_size(tmp_path: Path) -> None:
    tiny_model.main(["--save_dir", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (96, 2, 4, 2)
    assert config.intermediate_size == 288 and model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert 220_000 < model.num_parameters() < 230_000


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> torch.Tensor:
        tiny_model.main(["--save_dir", str(tmp_path / name), "--seed", str(seed), "--no-tie_word_embeddings", *SMALL])
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    first = weights("1", 1)
    torch.manual_seed(99)
    assert torch.equal(first, weights("2", 1)) and not torch.equal(first, weights("3", 2))


def test_the_alphabet_is_a_flag(tmp_path: Path) -> None:
    tiny_model.main(["--save_dir", str(tmp_path), "--alphabet", string.printable + string.digits, *SMALL])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(string.printable) + 2
    assert tokenizer.decode(tokenizer(string.printable)["input_ids"]) == string.printable


def test_bytes_survive_the_round_trip_through_a_directory(tmp_path: Path) -> None:
    tiny_model.main(["--save_dir", str(tmp_path), "--bytes", *SMALL])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "don't  stop — naïve\r\n\t«7» 12345 日本 🙂"
    assert len(tokenizer) == 258 and tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(st.text())
def test_bytes_read_any_text(text: str) -> None:
    ids = EVERY_BYTE(text.replace("<pad>", "").replace("<eos>", ""))["input_ids"]
    assert EVERY_BYTE.decode(ids) == text.replace("<pad>", "").replace("<eos>", "")


def test_indivisible_heads_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiny_model.main(["--save_dir", str(tmp_path / "m"), "--hidden_size", "18"])
    assert (
        "hidden_size 18 must be divisible by num_attention_heads 4" in capsys.readouterr().err and not (tmp_path / "m").exists()
    )
