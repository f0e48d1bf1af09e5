"""Loading, refusing, and running packed rows as transformers runs single ones."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CohereConfig,
    Gemma2Config,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
)

from configs.schema.common import ModelConfig
from tests import tiny
from tests.pickles import malicious_pickle
from tests.tiny import save_tiny_model
from tests.workers.engine.test_logprob import Largest
from tests.workers.engine.toy import VOCABULARY, plain_model, plain_outputs, toy_batch
from trainer.data.chat import load_tokenizer
from workers.batch import Batch
from workers.engine.fsdp.sharding import fill
from workers.engine.hf.hf_model import (
    PLAIN_RMS_NORMS,
    PackedModel,
    check_packing,
    empty_model,
    make_buffers,
    model_config,
    small_twin,
    stored_weights,
)
from workers.engine.hf.packed_attention import PackedRows

LENGTHS = [30, 30, 17, 9, 9, 2, 1]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def spec(path: str, **changes: Any) -> ModelConfig:
    return tiny.model_config(path, **changes)


def load(path: str, head: str = "lm", dtype: torch.dtype = torch.float32, **changes: Any) -> PackedModel:
    """As a rank that holds all of the model does."""
    model = spec(path, **changes)
    config = model_config(model, head)
    packed = empty_model(model, config, head, dtype)
    weights = stored_weights(packed, model)
    check_packing(small_twin(model, config, head), path)
    buffers = make_buffers(packed.hf, torch.device("cpu"))
    packed.to_empty(device="cpu")
    packed.hf.tie_weights()
    fill(packed, weights, buffers)
    return packed


def save(path: Path, config: PretrainedConfig, scale: float = 0.1) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, scale)
    model.save_pretrained(path)
    return str(path)


def run(model: PackedModel, batch: Batch, **extra: Any) -> dict[str, Tensor]:
    positions = batch.positions()
    rows = PackedRows.of(batch.lengths.tolist(), positions.device)
    return model(batch.tokens["input_ids"], positions, rows, positions.nonzero()[:, 0], **extra)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_packed_equals_single(models: dict[str, str], architecture: str) -> None:
    model, plain, batch = load(models[architecture]), plain_model(models[architecture]), toy_batch(LENGTHS)
    outputs = run(model, batch, temperature=0.7, outputs=("log_probs", "entropy"))
    rows = zip(batch.split_rows("input_ids"), *(outputs[name].split(LENGTHS) for name in ("log_probs", "entropy")), strict=True)
    losses = [outputs["log_probs"].sum() + outputs["entropy"].square().sum(), torch.zeros(())]
    for ids, log_probs, entropy in rows:
        their_log_probs, their_entropy = plain_outputs(plain, ids, 0.7)
        assert log_probs[0] == 0.0 and entropy[0] == 0.0
        torch.testing.assert_close(log_probs[1:], their_log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[1:], their_entropy, rtol=0, atol=1e-5)
        losses[1] = losses[1] + their_log_probs.sum() + their_entropy.square().sum()
    for loss in losses:
        loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.hf.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-4 * float(expected[name].grad.abs().max())
        )


def test_sliding_window_is_honoured(tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention"]
    path = save_tiny_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=layers)
    batch = toy_batch(LENGTHS)
    actual, plain = run(load(path), batch)["log_probs"].split(LENGTHS), plain_model(path)
    wide = load(path, override_config={"layer_types": ["full_attention"] * 2})
    for ids, log_probs in zip(batch.split_rows("input_ids"), actual, strict=True):
        torch.testing.assert_close(log_probs[1:], plain_outputs(plain, ids, 1.0)[0], rtol=0, atol=1e-5)
    assert (run(wide, batch)["log_probs"] - torch.cat(actual)).abs().max() > 1e-3


def test_no_row_sees_another(models: dict[str, str]) -> None:
    model, batch = load(models["qwen2"]), toy_batch(LENGTHS)
    before = run(model, batch)["log_probs"].split(LENGTHS)
    for changed in range(len(LENGTHS)):
        ids = [row.clone() for row in batch.split_rows("input_ids")]
        ids[changed] = (ids[changed] + 1) % VOCABULARY
        after = run(model, batch.with_tokens(input_ids=torch.cat(ids)))["log_probs"].split(LENGTHS)
        same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert same == [row != changed or LENGTHS[row] == 1 for row in range(len(LENGTHS))]


def test_nothing_is_quadratic_in_the_pack(models: dict[str, str]) -> None:
    """Neither a (T, T) mask nor a (T, V) table is made, forward or backward."""
    batch = toy_batch([20] * 100)
    model = load(models["qwen2"])
    with Largest() as seen:
        run(model, batch)["log_probs"].sum().backward()
    assert seen.elements == batch.total_tokens * 64  # the MLP's activations


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_empty_twin_has_the_same_names(models: dict[str, str], head: str) -> None:
    for path in models.values():
        model = spec(path)
        empty = empty_model(model, model_config(model, head), head, torch.float32)
        full = load(path, head)
        assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
        shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (empty, full)]
        assert shapes[0] == shapes[1]
        assert [type(layer) for layer in empty.layers] == [type(layer) for layer in full.layers] and len(full.layers) == 2


def values_row_by_row(path: str, batch: Batch) -> list[Tensor]:
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1).eval()
    return [model(input_ids=ids[None]).logits[0, :, 0] for ids in batch.split_rows("input_ids")]


def test_values_are_of_the_state_before_each_token(models: dict[str, str], tmp_path: Path) -> None:
    classifier = AutoModelForTokenClassification.from_pretrained(models["qwen2"], num_labels=1)
    nn.init.normal_(classifier.score.weight)
    nn.init.constant_(classifier.score.bias, 0.5)
    classifier.save_pretrained(tmp_path)
    batch = toy_batch(LENGTHS)
    outputs = run(load(str(tmp_path), "value"), batch)
    for row, after in enumerate(values_row_by_row(str(tmp_path), batch)):
        values = outputs["values"].split(LENGTHS)[row]
        assert values[0] == 0.0
        torch.testing.assert_close(values[1:], after[:-1], rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs["last_value"][row], after[-1], rtol=0, atol=1e-5)


def test_a_new_value_head_starts_at_zero_and_an_old_one_is_kept(models: dict[str, str], tmp_path: Path) -> None:
    fresh = load(models["qwen2"], "value")
    assert not fresh.value_head.weight.any() and not fresh.value_head.bias.any()
    classifier = AutoModelForSequenceClassification.from_pretrained(models["qwen2"], num_labels=1)
    nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(tmp_path)
    kept = load(str(tmp_path), "value")
    assert torch.equal(kept.value_head.weight, classifier.score.weight)
    assert not kept.value_head.bias.any()


def test_a_critic_of_a_body_without_a_token_classifier(tmp_path: Path) -> None:
    path = save(tmp_path, Olmo2Config(**{name: value for name, value in SIZES.items() if name != "head_dim"}))
    model = load(path, "value")
    assert type(model.hf).__name__ == "Olmo2ForTokenClassification"
    assert not run(model, toy_batch(LENGTHS))["values"].any()
    body = AutoModelForCausalLM.from_pretrained(path).model.state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in model.hf.model.state_dict().items())


def test_override_config(models: dict[str, str]) -> None:
    assert model_config(spec(models["qwen2"], override_config={"rms_norm_eps": 0.5}), "lm").rms_norm_eps == 0.5
    with pytest.raises(ValueError, match=r"override_config: rms_norm_epsilon not in the config of .* \(qwen2\)"):
        model_config(spec(models["qwen2"], override_config={"rms_norm_epsilon": 0.5}), "lm")


def test_a_hub_name_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^model\.path=no-such/model: [^\n]+$"):
        model_config(spec("no-such/model"), "lm")


def test_missing_weights_are_an_error(models: dict[str, str], tmp_path: Path) -> None:
    """Not a silent draw: a config with more layers than the file has."""
    for file in Path(models["qwen2"]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"12 weights are not there, such as model\.layers\.2"):
        load(str(tmp_path))


UNSUPPORTED = {
    "capped attention scores": (Gemma2Config(**SIZES, query_pre_attn_scalar=8), "score caps"),
    "scaled logits": (
        CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
        "its head or attention does something more",
    ),
    "rotation by the longest row": (
        Qwen2Config(
            **{k: v for k, v in SIZES.items() if k != "head_dim"},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        "cannot be packed: it has dynamic rope",
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_cannot_be_packed_is_refused_when_built(tmp_path: Path, reason: str) -> None:
    config, message = UNSUPPORTED[reason]
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, config, scale=0.5))


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    path, trace = Path(save_tiny_model(tmp_path / "model")), tmp_path / "trace"
    (path / "pytorch_model.bin").write_bytes(malicious_pickle(trace))
    load(str(path))  # there are safetensors, and these count
    (path / "model.safetensors").rename(path / "other.safetensors")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        load(str(path))
    (path / "other.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors there, and pytorch_model\.bin is a pickle, which is not read"):
        load(str(path))
    assert not trace.exists()


def foreign_model(path: Path) -> str:
    """It comes with code of its own, which no version of transformers has."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}))
    (path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}))
    (path / "code.py").write_text(
        f"from pathlib import Path\nPath({str(path / 'trace')!r}).touch()\nraise RuntimeError('it ran')\n"
    )
    (path / "model.safetensors").touch()
    return str(path)


def test_a_models_own_code_does_not_run_unasked(tmp_path: Path) -> None:
    path = foreign_model(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"comes with code of its own, which is not run unless model\.trust_remote_code=true"
    ) as reported:
        model_config(spec(path), "lm")
    assert "\n" not in str(reported.value) and not (tmp_path / "model/trace").exists()
    with pytest.raises(ValueError, match="comes with code of its own"):
        load_tokenizer(spec(path))
    with pytest.raises(RuntimeError, match="it ran"):
        model_config(spec(path, trust_remote_code=True), "lm")


@pytest.mark.parametrize("name", sorted(PLAIN_RMS_NORMS))
def test_the_norm_in_one_kernel_is_transformers_own(name: str) -> None:
    """What is computed on CUDA, here; and that it is the model's norms that do it there."""
    family = name.removesuffix("RMSNorm")
    package = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}.get(family, family.lower())
    kind = getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), name)
    norm, draw = kind(48, eps=1e-3).double(), torch.Generator().manual_seed(0)
    nn.init.normal_(norm.weight, generator=draw)
    hidden = torch.randn(2, 5, 48, generator=draw, dtype=torch.float64)
    fused = nn.functional.rms_norm(hidden, (48,), norm.weight, norm.variance_epsilon)
    torch.testing.assert_close(fused, norm(hidden), rtol=1e-5, atol=1e-6)


def test_every_norm_of_a_model_is_fused(models: dict[str, str]) -> None:
    model = spec(models["qwen3"])
    hf = empty_model(model, model_config(model, "lm"), "lm", torch.float32).hf
    norms = [module for module in hf.modules() if type(module).__name__.endswith("Norm")]
    assert len(norms) == 2 * 4 + 1 and {type(norm).forward.__module__ for norm in norms} == {empty_model.__module__}
    hidden = torch.ones(1, 3, len(norms[-1].weight), device="meta")
    assert norms[-1](hidden).shape == hidden.shape
