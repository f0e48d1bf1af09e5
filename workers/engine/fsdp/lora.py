"""LoRA (Hu et al. 2021, W + scaling * B A with a frozen W), implemented by peft.

peft's layers replace linear layers of the model; everything that leaves the engine has the base model's Hugging Face names. Of an
adapter on disk only adapter_config.json and the safetensors file are read: neither can contain a pickle.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.common import ModelConfig
from workers.engine.base import Head
from workers.engine.fsdp.sharding import full
from workers.engine.hf.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from workers.engine.hf.hf_model import PackedModel, empty_model, model_config
from workers.engine.stored_weights import StoredWeights

PREFIX = "base_model.model."  # prefix of module names in peft's files
NAME = "default"  # name of the adapter in the model
TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "value": "TOKEN_CLS", "reward": "SEQ_CLS"}
# Keys of adapter_config.json: the first set is used, the second is ignored: the weights show which modules are adapted.
USED_KEYS = {"r", "lora_alpha", "target_modules", "use_rslora", "modules_to_save"}
IGNORED_KEYS = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_dropout", "peft_type", "peft_version", "revision", "task_type",
}  # fmt: skip
PLAIN_INITS = (True, False, "gaussian")  # accepted init_lora_weights: PiSSA and others change the base model


def adapter_config(model: ModelConfig) -> LoraConfig | None:
    """Configuration of the model's adapter, read from ``lora_adapter_path`` if that is set; None without an adapter.

    Raises FileNotFoundError if there is no adapter at that path, ValueError for one that is not plain LoRA or has another rank.
    """
    if model.lora_adapter_path is not None:
        return _read_config(adapter_path(model), model.lora_rank)
    if not model.lora_rank:
        return None
    alpha = int(model.lora_alpha) if model.lora_alpha == int(model.lora_alpha) else model.lora_alpha
    return LoraConfig(r=model.lora_rank, lora_alpha=alpha, target_modules=model.target_modules)  # type: ignore[arg-type] # peft says int


def adapter_path(model: ModelConfig) -> Path:
    """Directory of ``lora_adapter_path``. Raises FileNotFoundError if one of peft's two files is missing."""
    assert model.lora_adapter_path is not None
    path = Path(model.lora_adapter_path).expanduser()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise FileNotFoundError(f"model.lora_adapter_path {path}: no {name} there (expected a directory of peft's)")
    return path


def _read_config(path: Path, rank: int) -> LoraConfig:
    """Read and validate adapter_config.json. rank: expected rank, 0 for any. Raises ValueError."""
    written: dict[str, Any] = json.loads((path / ADAPTER_CONFIG).read_text())
    if written.get("peft_type") != "LORA":
        raise ValueError(f"model.lora_adapter_path {path}: peft_type is {written.get('peft_type')}, not LORA")
    default = LoraConfig().to_dict()
    # A key with another value than peft's default changes what the adapter computes: it must not be ignored.
    more = sorted(
        key for key, value in written.items() if key not in USED_KEYS | IGNORED_KEYS and value and value != default.get(key)
    )
    if more:
        raise ValueError(f"model.lora_adapter_path {path}: {', '.join(more)} in {ADAPTER_CONFIG}: that is more than LoRA")
    if written.get("init_lora_weights", True) not in PLAIN_INITS:
        raise ValueError(
            f"model.lora_adapter_path {path}: init_lora_weights={written['init_lora_weights']} in {ADAPTER_CONFIG}: the adapter "
            "may belong to a base that was changed with it; have peft convert it to plain LoRA"
        )
    config = LoraConfig(**{key: written[key] for key in USED_KEYS & written.keys()})
    if rank not in (0, config.r):
        raise ValueError(f"model.lora_rank={rank}: the adapter in model.lora_adapter_path {path} has r={config.r}; leave it out")
    return config


def check_fit(model: ModelConfig, head: Head) -> None:
    """Check names and shapes of the adapter against the model, without loading weights. Raises ValueError, FileNotFoundError."""
    packed = empty_model(model, model_config(model, head), head, torch.float32)
    inject(packed, model, trained=False, seed=0)
    if model.lora_adapter_path is not None:
        _compare(Adapter(packed), adapter_path(model))


def add_adapter(
    sharded: PackedModel, initial: PackedModel, weights: StoredWeights, model: ModelConfig, *, trained: bool, seed: int
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Add the adapter to the meta-device model ``sharded``; returns its config and its initial weights.

    The weights are full tensors by the model's names, equal on every rank. initial: a second meta-device model in which they
    are created on the CPU. Its base weights have shapes but no values: no initial weight depends on them. See ``inject``.
    """
    config = inject(sharded, model, trained=trained, seed=seed)
    head = set(initial.value_head.parameters()) if initial.head != "lm" else set()
    for module in initial.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                # A value head gets memory of its own: its weights are read from files below.
                value = torch.empty if param in head else _empty
                module._parameters[leaf] = nn.Parameter(value(param.shape, dtype=param.dtype))
    # A value head is not made by peft: its initial weights come from the model's files, zero if these have none.
    if initial.head != "lm":
        name = _head_name(initial)
        weights.fill({f"{name}.{leaf}": (param.detach(), 0) for leaf, param in initial.value_head.named_parameters()})
    inject(initial, model, trained=trained, seed=seed)
    if model.lora_adapter_path is not None:
        Adapter(initial).read(adapter_path(model))
    # By identity: named_parameters and _trained_parameters list the same tensors.
    own = {id(param) for param in _trained_parameters(initial)}
    return config, {name: param.detach() for name, param in initial.hf.named_parameters() if id(param) in own}


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A CPU tensor of this shape with the memory of one number. peft creates its weights on the device of the base layer."""
    return torch.zeros((), dtype=dtype).expand(shape)


def inject(packed: PackedModel, model: ModelConfig, *, trained: bool, seed: int) -> LoraConfig:
    """Add the adapter to the model in place and freeze everything else; returns its config with module names filled in.

    peft initialises A from ``seed``, and B to zero. A value or reward head is trained completely, in addition to the adapter.
    Trained parameters are at least float32. Raises ValueError for module names that match nothing.
    """
    config = adapter_config(model)
    assert config is not None, "the model has no adapter"
    on_disk = model.lora_adapter_path is not None
    targets = _modules_on_disk(packed, adapter_path(model)) if on_disk else _matched(packed, model)
    config.target_modules = _abbreviated(packed.hf, targets)
    config.base_model_name_or_path = model.path
    config.task_type = TASKS[packed.head]
    config.modules_to_save = [_head_name(packed)] if packed.head != "lm" else None
    _inject_layers(packed, config, targets, seed)
    packed.hf.requires_grad_(False)
    for param in _trained_parameters(packed):
        param.requires_grad_(trained)
        param.data = param.data.to(torch.promote_types(param.dtype, torch.float32))
    return config


def _inject_layers(packed: PackedModel, config: LoraConfig, targets: list[str], seed: int) -> None:
    """Inject peft's layers into exactly these modules, in float32 at least (peft uses the base's dtype).

    The random state is forked: A depends on ``seed`` only, and the caller's random state does not change.
    """
    # peft matches ends of names: complete names select exactly these modules. The caller's config keeps the abbreviated ones,
    # which are written to adapter_config.json.
    exact = copy.deepcopy(config)
    exact.target_modules, exact.modules_to_save = targets, None
    on_meta = next(packed.hf.parameters()).is_meta
    # devices=[]: peft creates the weights on the CPU or on meta, so no GPU's generator is used.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(exact, packed.hf, adapter_name=NAME)
    for param in _lora_parameters(packed):
        param.data = param.data.to(torch.promote_types(param.dtype, torch.float32))


@torch.no_grad()
def merge_from(path: Path, packed: PackedModel) -> dict[str, Tensor]:
    """Merge the adapter in peft's directory ``path`` into the model in place; returns {Hugging Face name: weight}."""
    # Any seed will do: read() replaces the initial weights, or fails.
    _inject_layers(packed, _read_config(path, 0), _modules_on_disk(packed, path), seed=0)
    adapter = Adapter(packed)
    adapter.read(path)
    for name, weight in adapter.base.items():
        if name in adapter.scaling:
            weight.copy_(adapter.merged(name, None))
    return adapter.base


def _head_name(packed: PackedModel) -> str:
    return next(name for name, module in packed.hf.named_children() if module is packed.value_head)


def _trained_parameters(packed: PackedModel) -> list[nn.Parameter]:
    """Trained parameters: those of LoRA, and of a value or reward head."""
    return _lora_parameters(packed) + (list(packed.value_head.parameters()) if packed.head != "lm" else [])


def _lora_parameters(packed: PackedModel) -> list[nn.Parameter]:
    """Parameters A and B of all adapted layers."""
    return [param for name, param in packed.hf.named_parameters() if ".lora_" in name]


def _linear(packed: PackedModel) -> list[str]:
    """Names of the linear layers of the model body; neither the embedding nor a head is adapted."""
    body = packed.hf.base_model
    inside = {id(module) for module in body.modules()}
    return [name for name, module in packed.hf.named_modules() if isinstance(module, nn.Linear) and id(module) in inside]


def _matched(packed: PackedModel, model: ModelConfig) -> list[str]:
    """Layers that ``target_modules`` selects, by peft's rules: a list of name suffixes, or a regex for complete names."""
    layers, wanted = _linear(packed), model.target_modules
    if wanted == "all-linear":
        return layers
    known = f"linear layers there are {', '.join(sorted({name.rpartition('.')[2] for name in layers}))}"
    if isinstance(wanted, str):
        try:
            found = [name for name in layers if re.fullmatch(wanted, name)]
        except re.error as error:
            raise ValueError(f"model.target_modules={wanted}: no pattern: {error}") from error
        if not found:
            raise ValueError(
                f"model.target_modules={wanted}: a pattern that fits no whole name, such as {layers[0]}; names alone are a list, "
                f"[q_proj,v_proj]; {known}"
            )
        return found
    for end in wanted:
        if not any(name == end or name.endswith(f".{end}") for name in layers):
            raise ValueError(f"model.target_modules: {end} is no layer in the body of {model.path}; {known}")
    return [name for name in layers if any(name == end or name.endswith(f".{end}") for end in wanted)]


def _modules_on_disk(packed: PackedModel, path: Path) -> list[str]:
    """Names of the modules that the adapter file has weights for. Raises ValueError if one is no linear layer of the body."""
    with safe_open(path / ADAPTER_WEIGHTS, "pt") as file:
        names = sorted(file.keys())
    ending, layers = ".lora_A.weight", set(_linear(packed))
    found = [name.removeprefix(PREFIX).removesuffix(ending) for name in names if name.endswith(ending)]
    if unknown := [name for name in found if name not in layers]:
        raise ValueError(f"model.lora_adapter_path {path}: {unknown[0]} is no linear layer in the body of this model")
    if not found:
        raise ValueError(f"model.lora_adapter_path {path}: no weight of LoRA in {ADAPTER_WEIGHTS}")
    return found


def _abbreviated(hf: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Abbreviate module names to their last components, the form that engines and users know, if that is unambiguous."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    matching = {name for name, _ in hf.named_modules() if name.rpartition(".")[2] in ends}
    return ends if matching == set(targets) else sorted(targets)


class Adapter:
    """The adapter of a model whose parameters have their final storage.

    Names are peft's file names, without the adapter's own name. base: {Hugging Face name: weight} of the model without adapter.
    own: {peft name: weight} of everything that is trained. scaling: {Hugging Face name of an adapted weight: factor of B A}.
    """

    def __init__(self, packed: PackedModel, config: LoraConfig | None = None) -> None:
        hf = packed.hf
        self.config = config
        self._params = list(hf.parameters())
        self._layers = {name: module for name, module in hf.named_modules() if isinstance(module, LoraLayer)}
        state: dict[str, Tensor] = hf.state_dict(keep_vars=True)
        self.base = {name.replace(".base_layer.", "."): weight for name, weight in state.items() if ".lora_" not in name}
        self.own = {f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": weight for name, weight in state.items() if ".lora_" in name}
        if packed.head != "lm":
            head = _head_name(packed)
            self.own |= {f"{PREFIX}{name}": weight for name, weight in state.items() if name.startswith(f"{head}.")}
        self.scaling = {f"{name}.weight": layer.scaling[NAME] for name, layer in self._layers.items()}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter in the block: the base model alone runs.

        peft freezes the parameters of a disabled adapter and unfreezes them afterwards, even where nothing is trained. FSDP reads
        requires_grad when it gathers, so the flags are restored immediately.
        """
        flags = [param.requires_grad for param in self._params]

        def switch(on: bool) -> None:
            for layer in self._layers.values():
                layer.enable_adapters(on)
            for param, flag in zip(self._params, flags, strict=True):
                param.requires_grad_(flag)

        switch(False)
        try:
            yield
        finally:  # after an error too: updates without the adapter would silently change nothing
            switch(True)

    @torch.no_grad()
    def merged(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Base weight plus the adapter's product, computed in float32 at least, then cast to ``dtype``. Collective."""
        if name not in self.scaling:
            return full(self.base[name], dtype)
        weight = full(self.base[name])
        a, b = (full(self.own[f"{PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight"]) for part in "AB")
        # Added before the cast: in bfloat16 a product 256 times smaller than the weight would be lost.
        whole = weight.to(torch.promote_types(weight.dtype, torch.float32)) + (b @ a) * self.scaling[name]
        return whole if dtype is None else whole.to(dtype)

    @torch.no_grad()
    def read(self, path: Path) -> None:
        """Load the weights of peft's directory. Raises ValueError for missing, unknown or mismatched weights."""
        _compare(self, path)
        with safe_open(path / ADAPTER_WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118 # it is no dict
                self.own[name].copy_(file.get_tensor(name))


def _compare(adapter: Adapter, path: Path) -> None:
    """Raise ValueError if names or shapes differ from the file's. A value head may be missing; it then keeps its weights."""
    with safe_open(path / ADAPTER_WEIGHTS, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # it is no dict
    wanted = {name: tuple(weight.shape) for name, weight in adapter.own.items()}
    place = f"model.lora_adapter_path {path}"
    if unknown := sorted(shapes.keys() - wanted.keys()):
        raise ValueError(f"{place}: {len(unknown)} weights fit nowhere in this model, such as {unknown[0]}")
    if missing := sorted(name for name in wanted.keys() - shapes.keys() if ".lora_" in name):
        raise ValueError(f"{place}: {len(missing)} weights are not there, such as {missing[0]}")
    for name, shape in shapes.items():
        if shape != wanted[name]:
            raise ValueError(f"{place}: {name} is {shape} there and {wanted[name]} in this model")
