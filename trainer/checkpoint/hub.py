"""Model cards with the provenance of a run, and pushes of exported models to the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, constants, errors, get_token
from huggingface_hub.utils import validate_repo_id

from trainer.checkpoint.manifest import Checkpoint
from trainer.run.version import __version__
from workers.engine.hf.checkpoint import ADAPTER_CONFIG
from workers.model_path import hub_unreachable, silence_hub

CARD = "README.md"
ABOUT = {
    "actor": "The policy of a reinforcement-learning run",
    "critic": "The critic (a token classifier with one label) of a reinforcement-learning run",
    "model": "The model of a supervised run",
}
TASKS = {
    "CausalLM": "text-generation",
    "TokenClassification": "token-classification",
    "SequenceClassification": "text-classification",
}
"""End of an architecture's name -> the hub's name of what it is for."""


def check_hub(name: str) -> None:
    """Raise ValueError if nothing can be pushed to the repository ``name``, as far as this is known without the hub's answer."""
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise ValueError(f"hub={name}: {error}") from error
    if "/" not in name:
        raise ValueError(f"hub={name}: not OWNER/NAME, a user or organization of the hub and a model's name")
    unreachable = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hub_unreachable()
    if unreachable:
        raise ValueError(f"hub={name}: nothing can be pushed: {unreachable}; hub=null only exports, `hf upload` pushes later")
    if get_token() is None:
        raise ValueError(f"hub={name}: no token of the hub; log in with `hf auth login`, or set HF_TOKEN")


def push(model: Path, name: str, step: int) -> str:
    """Push a directory to a model repository; one that does not exist is created, private. Returns the commit's URL.

    Raises ValueError, with the command that repeats the push, if the hub refuses it or cannot be reached.
    """
    silence_hub()
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=model, commit_message=f"Step {step}").commit_url)
    except (OSError, errors.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"hub={name}: the model is in {model} and was not pushed: {reason}; to push it: hf upload {name} {model}"
        ) from error


def write_card(checkpoint: Checkpoint, role: str, which: str, model: Path) -> None:
    """Write the model card README.md into ``model``, the exported ``role`` of the checkpoint.

    which: "trained" or "ema". Manifests of earlier versions have no command; the card then says so.
    """
    manifest = checkpoint.manifest
    config, code = manifest.config, manifest.code
    base = str(model_config(config, role)["path"])
    on_hub = base.count("/") <= 1 and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    adapter = (model / ADAPTER_CONFIG).exists()
    architecture = json.loads((checkpoint.role(role) / "config.json").read_text())["architectures"][0]
    data = ModelCardData(
        base_model=base if on_hub else None,  # the hub refuses other names
        library_name="peft" if adapter else "transformers",
        pipeline_tag=TASKS.get(architecture.partition("For")[2]),
        tags=["tandem"],
    )
    rows = {
        "base model": f"`{base}`" + ("" if on_hub else ", a directory of the machine that trained it"),
        "weights": ("LoRA adapter" if adapter else "whole model") + (", moving average" if which == "ema" else ""),
        "step": str(manifest.step),
        "seeds": ", ".join(f"{key}={value}" for key, value in seeds(config).items()),
        "code": f"Tandem {code.get('tandem') or 'of an unknown version'}, commit {code.get('commit') or 'unknown'}",
        "exported by": f"Tandem {__version__}",
        **{f"`{name}`": f"{value:.4g}" for name, value in manifest.metrics.items()},
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    about = f"{ABOUT.get(role, ABOUT['model'])}, after {manifest.step} steps of training with Tandem."
    command = f"```bash\n{code['command']}\n```" if code.get("command") else "Not recorded by the version that trained it."
    (model / CARD).write_text(
        f"---\n{data.to_yaml()}\n---\n\n# {config['trainer']['experiment_name']}\n\n{about}\n\n## Provenance\n\n"
        f"| what | value |\n|---|---|\n{table}\n\nA `+` behind the commit: with uncommitted changes.\n\n"
        f"## Command\n\n{command}\n",
        encoding="utf-8",
    )


def model_config(config: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    """`model` block of a role, in the configuration of a PPO or a supervised run."""
    owner = {"actor": "actor_rollout_ref", "critic": "critic"}.get(role)
    found: Mapping[str, Any] = (config if owner is None else config[owner])["model"]
    return found


def seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a configuration that are named seed and set."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": seed for inner, seed in seeds(value).items()}
        elif key == "seed" and value is not None:
            found[key] = value
    return found
