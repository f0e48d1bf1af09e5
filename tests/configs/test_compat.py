"""configs/compat.yaml, and the defaults that are verl's."""

import ast
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.argv import compat
from configs.compose import compose
from configs.keys import CONFIG_DIR, keys_of
from configs.schema.evaluation import EvaluationConfig
from configs.schema.export import ExportConfig
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.schema.sft import SFTConfig

VERL_DEFAULTS = Path(__file__).with_name("verl_defaults.tsv")
DIFFERENCES: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "compat.yaml"))["differences"]  # type: ignore[index, call-overload]


def verl_defaults() -> dict[str, Any]:
    """Dotted key: default, as verl's composed configuration has them; keys by our names."""
    keys = keys_of(PPOConfig)
    tree = OmegaConf.create()
    for line in VERL_DEFAULTS.read_text().splitlines()[1:]:
        key, text = line.split("\t")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        OmegaConf.update(tree, compat().rename(key, keys), value, force_add=True)
    return {key: OmegaConf.select(tree, key) for key in keys.leaves if not OmegaConf.is_missing(tree, key.split(".")[0])}


def test_defaults_are_verls_unless_the_difference_is_listed() -> None:
    known = {line.split("\t")[0] for line in VERL_DEFAULTS.read_text().splitlines()[1:]}
    keys = keys_of(PPOConfig)
    ours = OmegaConf.create(asdict(compose("ppo_trainer", PPOConfig)))
    verl = verl_defaults()
    unlike = []
    for key in sorted({compat().rename(name, keys) for name in known}):
        mine, theirs = OmegaConf.select(ours, key), verl[key]
        if key in {"data.train_files", "data.val_files"}:
            mine = mine[0]
        if isinstance(theirs, str):
            theirs = str(Path(theirs).expanduser()) if theirs.startswith("~") else theirs
        if mine != theirs and key not in DIFFERENCES:
            unlike.append((key, mine, theirs))
    assert len(known) > 150 and unlike == []


def test_listed_differences_are_differences() -> None:
    ours = OmegaConf.create(asdict(compose("ppo_trainer", PPOConfig)))
    assert all(OmegaConf.select(ours, key) != entry["verl"] for key, entry in DIFFERENCES.items())


SCHEMAS = (PPOConfig, SFTConfig, GenerationConfig, EvaluationConfig, ParityConfig, ExportConfig)


def test_aliases_lead_to_keys_of_some_program_and_hide_none() -> None:
    programs = [keys_of(schema) for schema in SCHEMAS]
    for other, ours in compat().alias.items():
        assert any(keys.knows(ours.removesuffix(".*")) for keys in programs), ours
        assert not any(keys.knows(other.removesuffix(".*")) and keys.knows(ours.removesuffix(".*")) for keys in programs), other


def test_what_is_left_out_or_refused_is_no_key_of_ours() -> None:
    for name in (*compat().accepted, *compat().refused):
        assert "*" in name or not any(keys_of(schema).knows(name) for schema in SCHEMAS), name
    limited = [entry for entry in compat().accepted.values() if entry.values is not None]
    assert limited and all(entry.otherwise for entry in limited)


def test_values_are_told_apart_by_kind() -> None:
    entry = compat().accepted["trainer.validation_data_dir"]
    assert entry.takes(None) and not entry.takes("a/b") and not entry.takes(0)
    one = compat().accepted["*ulysses_sequence_parallel_size"]
    assert one.takes(1) and not one.takes(True) and not one.takes(2)
