"""Rates of a machine, from a file of configs/hardware or of scripts/bench/calibrate.py. SI units: bytes, seconds, FLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import yaml

from configs.base.keys import CONFIG_DIR, did_you_mean

FOLDER = CONFIG_DIR / "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareCosts:
    """Costs of Tandem and its engines on a machine, measured, in seconds.

    layer: Python and kernel launches of one decoder layer's forward in training. batch: what surrounds the layers of a
    micro-batch, each time that they are passed. update: an optimizer step besides AdamW's kernels. turn: a call of a rollout
    engine. decode, decode_row: host work of a decode step, and of each of its sequences. decode_layer: launches of a layer in a
    decode step without CUDA graphs. phase: one call of all workers. token: the controller's work per token of the batch. sleep:
    putting an engine to sleep. sync: bytes per second of a weight sync.
    """

    layer: float
    batch: float
    update: float
    turn: float
    decode: float
    decode_row: float
    decode_layer: float
    phase: float
    token: float
    sleep: float
    sync: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one GPU (device cuda) or of one worker's core (cpu) and of its links.

    memory: bytes of a GPU. float32, bfloat16: peak FLOP/s of matrix products; products, attention: fractions of it that training
    reaches. bandwidth: peak bytes per second of device memory; streaming, reading: fractions of it that elementwise kernels of
    training and the reads of a decode step reach. link, network: bytes per second that a GPU sends within and between nodes;
    latency: seconds of a collective of no bytes. host_link: bytes per second between host and device.
    """

    name: str
    device: Literal["cuda", "cpu"]
    memory: float
    float32: float
    bfloat16: float
    products: float
    attention: float
    bandwidth: float
    streaming: float
    reading: float
    link: float
    network: float
    latency: float
    host_link: float
    software: SoftwareCosts

    def peak(self, bytes_per_number: int) -> float:
        """Peak FLOP/s of products of numbers of this size."""
        return self.float32 if bytes_per_number >= 4 else self.bfloat16


def load_hardware(name: str) -> Hardware:
    """Hardware by the name of a file in configs/hardware, in any case, or by the path of a YAML file. Raises ValueError."""
    path = Path(name).expanduser() if name.endswith(".yaml") else FOLDER / f"{name.lower()}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
        raise ValueError(f"cluster={name}: unknown hardware; known: {', '.join(known)}{did_you_mean(name.lower(), known)}")
    try:
        rates = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}; see configs/hardware") from error
    if not isinstance(rates, dict):
        raise ValueError(f"{path}: must be a mapping of keys to values; see configs/hardware")
    names = {field.name for kind in (Hardware, SoftwareCosts) for field in fields(kind)} - {"name", "software"}
    if wrong := names ^ rates.keys():
        raise ValueError(f"{path.name}: keys that are missing or unknown: {', '.join(sorted(wrong))}; see configs/hardware")
    device = rates.pop("device")
    # PyYAML reads 9e14 as text.
    values = {key: float(rate["value"]) for key, rate in rates.items()}
    software = SoftwareCosts(**{field.name: values.pop(field.name) for field in fields(SoftwareCosts)})
    return Hardware(name=path.stem, device=device, software=software, **values)


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """Nodes with equal GPUs."""

    nodes: int
    gpus: int
    hardware: Hardware

    @classmethod
    def of(cls, words: str) -> GpuCluster:
        """From words such as 2x8xH100: nodes, GPUs per node, hardware. Raises ValueError."""
        if (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x(.+)", words)) is None:
            raise ValueError(f"cluster={words}: must be nodes x GPUs per node x hardware, for example 2x8xH100")
        return cls(int(found[1]), int(found[2]), load_hardware(found[3]))
