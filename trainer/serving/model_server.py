"""Run a model server: the engines in the main thread, HTTP in a second thread."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from configs.schema.common import ProgramConfig, TokenizedModelConfig
from configs.schema.evaluation import ExportConfig
from configs.schema.serve import ServeConfig
from trainer.agents.formats import call_format
from trainer.checkpoint import export
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.resume import LATEST
from trainer.cluster.launch import opened_workers
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer, stop_token_ids
from trainer.data.seam import Seams
from trainer.rollout.rollout_builder import start_engine
from trainer.serving.listener import Listener, bound, check_installed
from workers.controller.stop import graceful_stop
from workers.engine.hf.checkpoint import ADAPTER_CONFIG
from workers.engine.hf.hf_model import model_config, vocab_size
from workers.model_path import check_files
from workers.roles.rollout_engines import check_installed as check_engine_installed
from workers.roles.train_engines import check_adapter
from workers.rollout.base import RolloutSpec, Sampling

if TYPE_CHECKING:
    from trainer.serving.model_app import ServedModel
    from trainer.serving.model_engine import ModelEngine

_LONGEST = 8192  # tokens of prompt and response, unless rollout.max_model_len says otherwise


def run(config: ServeConfig) -> None:
    """Serve until a signal arrives. Raises ValueError for user errors, before the server listens."""
    check_installed()
    check_engine_installed(config.actor_rollout_ref.rollout.name)
    from trainer.serving.model_app import model_app

    token = config.server.token or secrets.token_urlsafe(24)
    with graceful_stop(), ExitStack() as stack:
        # Bind first: an occupied port is reported before a model is loaded. The socket listens only once the engine is ready.
        place = stack.enter_context(bound(config.server))
        engine, model = start(config, stack)
        most_bytes = int(config.server.max_request_mb * (1 << 20))
        app = model_app(
            engine, model, token=token, most_bytes=most_bytes, health=lambda: {"unfinished": engine.unfinished} | engine.counts
        )
        listener = stack.enter_context(Listener(place, app, config.server))
        print(f"serving {model.name} at {listener.url} (process {os.getpid()})", flush=True)
        if config.server.token is None:
            print(f"{config.server.token_env} is not set; token of this server: {token}", flush=True)
        engine.work(is_running=listener.is_alive)
        raise RuntimeError("the listener has ended")


def start(config: ServeConfig, stack: ExitStack) -> tuple[ModelEngine, ServedModel]:
    """Start the engines on workers, which end with ``stack``. Raises ValueError, one line, for a model that does not work."""
    from trainer.serving.model_app import ServedModel
    from trainer.serving.model_engine import ModelEngine

    rollout = config.actor_rollout_ref.rollout
    model = stack.enter_context(model_files(config))
    if model.path == config.model:
        check_files(model.path, "model")
    check_adapter("model", model, "lm")
    tokenizer = load_tokenizer(model)
    if not tokenizer.is_fast:
        raise ValueError(f"model={config.model}: its tokenizer has no tokenizer.json, which text in parts is decoded with")
    longest = rollout.max_model_len
    if longest is None:
        longest = min(_LONGEST, model_config(model, "lm").get_text_config().max_position_embeddings)
    spec = RolloutSpec(model=model, rollout=rollout, max_model_len=longest, device=config.trainer.device)
    sampling = Sampling(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_tokens=longest - 1,
        stop_token_ids=stop_token_ids(tokenizer, model),
        ignore_eos=rollout.ignore_eos,
    )
    served = ServedModel(
        name=name_of(config.model),
        seams=Seams(tokenizer, config.data.apply_chat_template_kwargs),
        format_name=config.multi_turn.format,
        format=call_format(config.multi_turn.format),
        sampling=sampling,
        max_length=longest,
        vocab_size=vocab_size(model),
        has_seeds=has_seeds(config),
    )
    watchdog = Watchdog(asdict(config.timeouts), Path(config.trainer.default_local_dir))
    engines = start_engine(stack.enter_context(opened_workers(config)), spec, watchdog, seed=config.trainer.seed)
    return ModelEngine(engines, sampling, most=rollout.max_num_seqs * engines.n_replicas + config.server.max_waiting), served


def has_seeds(config: ServeConfig) -> bool:
    """Whether the engine samples by the seeds of requests."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "sglang" or config.trainer.device == "cpu":
        return True
    return rollout.engine_kwargs.sglang.get("enable_deterministic_inference") is True


@contextmanager
def model_files(config: ServeConfig) -> Iterator[TokenizedModelConfig]:
    """The model to load, of ``model``: as it is, an adapter with its base model, or a checkpoint that is exported meanwhile.

    Raises ValueError for a checkpoint or adapter that cannot be read.
    """
    model, place = config.actor_rollout_ref.model, Path(config.model).expanduser()
    if (place / ADAPTER_CONFIG).exists():
        yield adapter_on_base(model, place)
    elif (place / MANIFEST).exists() or (place / LATEST).exists():
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix="model_") as exported:
            output = Path(exported) / "model"
            export.run(
                ExportConfig(
                    checkpoint=str(place), output=str(output), trust_remote_code=model.trust_remote_code, merge=True, role=None,
                    which="trained", hub=None,
                    trainer=ProgramConfig(
                        default_local_dir=exported, seed=config.trainer.seed, dry_run=None, full_traceback=False
                    ),
                )
            )  # fmt: skip
            yield replace(model, path=str(output))
    else:
        yield model


def adapter_on_base(model: TokenizedModelConfig, adapter: Path) -> TokenizedModelConfig:
    """The base model with the adapter of a PEFT directory. Raises ValueError if the directory names no base model."""
    base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model={adapter}: its {ADAPTER_CONFIG} names no base model (base_model_name_or_path)")
    own_tokenizer = str(adapter) if (adapter / "tokenizer_config.json").exists() else None
    tokenizer = model.tokenizer_path or own_tokenizer
    return replace(model, path=base, lora_adapter_path=str(adapter), tokenizer_path=tokenizer)


def name_of(model: str) -> str:
    """Name that requests have: of a directory its last part, otherwise the hub name."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
