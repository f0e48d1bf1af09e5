import pytest

from configs.base.secrets import hidden, hidden_lines, is_secret, secrets_in


@pytest.mark.parametrize(
    "key", ["api_key", "WANDB_API_KEY", "HF_TOKEN", "hf-token", "AWS_SECRET_ACCESS_KEY", "password", "token"]
)
def test_secrets_are_recognized_by_name(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize("key", ["max_tokens", "tokenizer_path", "loss_agg_mode", "api_key_env", "ppo_max_token_len_per_gpu"])
def test_other_names_are_no_secrets(key: str) -> None:
    assert not is_secret(key)


def test_secrets_of_the_environment_are_hidden_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret-s3cret")
    monkeypatch.setenv("SHORT_TOKEN", "gpt2")
    assert hidden("Bearer s3cret-s3cret, gpt2") == "Bearer ***, gpt2"
    assert hidden("http://user:pw@host/x and ssh://git@host") == "http://***@host/x and ssh://***@host"


def test_secrets_are_found_in_overrides() -> None:
    assert list(secrets_in("a.hf_token", "s3cret")) == ["a.hf_token"]
    assert list(secrets_in("env", {"A_TOKEN": "s3cret", "n": [{"password": "x"}]})) == ["env.A_TOKEN", "env.n.password"]
    assert list(secrets_in("url", "s3://id:s3cret@bucket")) == ["url"]
    for harmless in ("${oc.env:HF_TOKEN}", "", None, 5, "False", "null"):
        assert list(secrets_in("a.hf_token", harmless)) == []
    assert list(secrets_in("url", "ssh://git@host:22/x")) == []


def test_printed_yaml_contains_no_secrets() -> None:
    lines = {
        "env:": "env:",
        "  A_TOKEN: s3cret": "  A_TOKEN: '***'",
        "  B_TOKEN: ${oc.env:B}": "  B_TOKEN: ${oc.env:B}",
        "  api_key: null": "  api_key: null",
        "  url: http://u:s3cret@h": "  url: http://***@h",
        "- password: x y": "- password: '***'",
        "max_tokens: 5": "max_tokens: 5",
    }
    assert hidden_lines("\n".join(lines) + "\n") == "\n".join(lines.values()) + "\n"
