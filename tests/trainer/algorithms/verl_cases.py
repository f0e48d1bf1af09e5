"""Values of verl 0.9.1 (Apache-2.0, github.com/verl-project/verl) for small awkward batches, in verl_cases.json.

To create the file again where verl can be imported (pip install --no-deps verl==0.9.1, and the packages that it then imports):

    python -m tests.trainer.algorithms.verl_cases

Everything is computed in float64 from inputs rounded to three decimals; results have eight significant digits. A result
is a list over the positions that the mask marks, row by row. Cases without a value in verl 0.9.1 are excluded: whitening a single
token, pass@k of a group of one, an aggregation mode that sapo and geo_mean ignore, a batch without a trained token.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATH = Path(__file__).with_suffix(".json")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FLOATS = ("mask", "token_rewards", "values", "returns", "vpreds", "baselines", "old_log_probs", "log_probs", "sum_pi_squared")
FLOATS += ("is_weights", "advantages", "token_advantages", "accuracy", "brevity")

# Rows of `ragged`: full, cut right, a hole, padded left, one token, none ... `equal`: two groups of equal scores, one of two.
# `extreme`: log-ratios of 30 in column 1 and -30 in column 2, so that its last row has one of 30 alone.
MASKS = {
    "ragged": ["1111111", "1111000", "1100110", "0011111", "0001000", "0000000", "1111110", "0110110"],
    "equal": ["11111", "11100", "11110", "11111", "10000", "11100"],
    "extreme": ["111111", "111100", "011111", "111001", "010000"],
    "single": ["1"],
}
GROUPS: dict[str, list[Any]] = {
    "ragged": ["q7", "q2", "q7", "solo", "q2", "q7", "q2", "q7"],
    "equal": [30, 5, 30, 5, 12, 12],
    "extreme": [0, 1, 0, 1, 1],
    "single": [9],
}
SCORES = {"equal": [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "extreme": [1.0, 1.0, 0.0, 1.0, 0.0]}


def batch(name: str, seed: int) -> dict[str, Any]:
    """Rewards, values, log-probs, advantages and weights (B, R) under the masks and groups of ``name``."""
    r = np.random.default_rng(seed)
    mask = np.array([[float(mark) for mark in row] for row in MASKS[name]])
    n, width = mask.shape
    scores = np.array(SCORES[name]) if name in SCORES else r.normal(size=n)
    rewards = np.zeros_like(mask)
    for row in range(n):
        marked = np.flatnonzero(mask[row])
        rewards[row, marked[-1] if len(marked) else -1] = scores[row]
    old = -r.exponential(1.0, size=mask.shape)
    new = np.minimum(old + r.normal(size=mask.shape) * 0.4, -0.001)
    if name == "extreme":
        old[:, 1], new[:, 1] = -30.5, -0.25
        old[:, 2], new[:, 2] = -0.25, -30.5
    advantages = r.normal(size=(n, 1)).repeat(width, 1)
    advantages[1::4] = 0.0
    found = {
        "mask": mask, "token_rewards": rewards, "values": r.normal(size=mask.shape), "returns": r.normal(size=mask.shape),
        "vpreds": r.normal(size=mask.shape), "baselines": r.normal(size=n), "old_log_probs": old, "log_probs": new,
        "sum_pi_squared": r.random(mask.shape), "is_weights": np.exp(0.5 * r.normal(size=mask.shape)),
        "advantages": advantages, "token_advantages": r.normal(size=mask.shape), "accuracy": (r.random(n) < 0.5) * 1.0,
        "brevity": r.normal(size=n),
    }  # fmt: skip
    return {key: (value.round(3) + 0.0).tolist() for key, value in found.items()} | {"groups": GROUPS[name]}


def load() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """{batch: its columns as float64 tensors, groups as a list} and the cases."""
    stored = json.loads(PATH.read_text())
    batches = {
        name: {key: torch.tensor(value, dtype=torch.float64) if key in FLOATS else value for key, value in columns.items()}
        for name, columns in stored["batches"].items()
    }
    return batches, stored["cases"]


def digits(values: Tensor | float) -> Any:
    """Eight significant digits; nested as the tensor is."""
    if isinstance(values, Tensor) and values.ndim:
        return [digits(value) for value in values.detach()]
    return float(f"{values.item() if isinstance(values, Tensor) else values:.8g}")


class Verl:
    """verl's functions under the signatures of tests/trainer/algorithms/padded.py."""

    def __init__(self) -> None:
        self.core = importlib.import_module("verl.trainer.ppo.core_algos")
        self.correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        self.actor = importlib.import_module("verl.workers.config.actor")
        self.algorithm = importlib.import_module("verl.trainer.config").AlgoConfig

    def advantages(self, name: str, b: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        given = {"token_level_rewards": b["token_rewards"].clone(), "response_mask": b["mask"]}
        if name == "gae":
            return self.core.compute_gae_advantage_return(values=b["values"], **given, **options)
        given["index"] = np.array(b["groups"], dtype=object)
        if name == "grpo":
            return self.core.compute_grpo_outcome_advantage(**given, **options)
        if name == "remax":
            given["reward_baselines"] = b["baselines"]
        if name == "optimal_token_baseline":
            name = "tir_optimal_token_baseline"  # positions among the trained tokens; the other one counts those between them
            given |= {"old_log_probs": b["old_log_probs"], "sum_pi_squared": b["sum_pi_squared"]}
            given["rollout_is_weights"] = b["is_weights"] if options else None
            options = {}
        if name == "gdpo":
            n, width = b["mask"].shape
            given["non_tensor_batch"] = {key: b[key].numpy() for key in ("accuracy", "brevity")}
            given["batch"] = {"prompts": torch.zeros(n, 1), "attention_mask": torch.ones(n, 1 + width, dtype=torch.long)}
            options = options | {"gdpo_reward_keys": ["accuracy", "brevity"]}
        return self.core.get_adv_estimator_fn(name)(**given, config=self.algorithm(**options))

    def policy_loss(
        self, name: str, b: dict[str, Any], log_probs: Tensor, mode: str, weights: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, float]]:
        torch.manual_seed(5)  # clip_cov samples the tokens that it excludes
        inner = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"}
        config = self.actor.ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
            policy_loss=self.actor.PolicyLossConfig(**{key: options[key] for key in options.keys() & inner}),
            **{key: options[key] for key in options.keys() - inner},
        )  # fmt: skip
        advantages = b["token_advantages"] if name != "geo_mean" else b["advantages"]
        loss = self.core.get_policy_loss_fn(name)
        return loss(b["old_log_probs"], log_probs, advantages, b["mask"], mode, config, weights)


def advantage_cases(verl: Verl, batches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    options: dict[str, list[dict[str, Any]]] = {
        "gae": [{"gamma": 1.0, "lam": 1.0}, {"gamma": 0.97, "lam": 0.9}],
        "grpo": [{"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}],
        "grpo_passk": [{"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}],
        "rloo": [{}], "reinforce_plus_plus": [{"gamma": 1.0}, {"gamma": 0.9}], "reinforce_plus_plus_baseline": [{}],
        "remax": [{}], "opo": [{}], "gpg": [{}], "gdpo": [{}, {"gdpo_reward_weights": [1.0, 0.25]}],
        "optimal_token_baseline": [{}, {"rollout_is_weights": True}],
    }  # fmt: skip
    cases = []
    for name, variants in options.items():
        for at in ("ragged", "equal", "extreme"):
            if name == "grpo_passk" and at == "ragged":
                continue
            for variant in variants:
                b = batches[at]
                found = zip(("advantages", "returns"), verl.advantages(name, b, variant), strict=True)
                expected = {key: digits(value[b["mask"] > 0]) for key, value in found}
                cases.append({"what": "advantages", "name": name, "batch": at, "options": variant, **expected})
    return cases


def loss_cases(verl: Verl, batches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    options: dict[str, dict[str, Any]] = {
        "vanilla": clip | {"clip_ratio_c": 1.5}, "gspo": clip, "cispo": clip, "geo_mean": clip, "gpg": {},
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "dppo_tv": clip | {"clip_ratio_c": 3.0}, "dppo_kl": clip | {"clip_ratio_c": 3.0},
        "clip_cov": clip | {"clip_cov_ratio": 0.3, "clip_cov_lb": -0.2, "clip_cov_ub": 5.0},
        "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
    }  # fmt: skip
    cases = []
    for name, given in options.items():
        for at in ("equal", "extreme") if name == "geo_mean" else ("ragged", "extreme", "single"):
            for mode in ("seq-mean-token-mean",) if name in {"sapo", "geo_mean"} else MODES:
                for weighted in (False, True):
                    if weighted and at == "single":
                        continue
                    b = batches[at]
                    x = b["log_probs"].clone().requires_grad_()
                    loss, metrics = verl.policy_loss(name, b, x, mode, b["is_weights"] if weighted else None, given)
                    loss.backward()
                    assert x.grad is not None
                    case = {
                        "what": "policy_loss",
                        "name": name,
                        "batch": at,
                        "mode": mode,
                        "weighted": weighted,
                        "options": given,
                    }
                    case |= {"loss": digits(loss), "metrics": {key: digits(value) for key, value in metrics.items()}}
                    # The gradient under one mode is that under another times a factor of the row: once says enough.
                    if mode == "seq-mean-token-mean":
                        case["gradient"] = digits(x.grad[b["mask"] > 0])
                    cases.append(case)
    return cases


def value_and_kl_cases(verl: Verl, batches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    cases = []
    for at in ("ragged", "extreme", "single"):
        b = batches[at]
        for mode in MODES:
            loss, fraction = verl.core.compute_value_loss(b["vpreds"], b["returns"], b["values"], b["mask"], 0.5, mode)
            found = {"loss": digits(loss), "clip_fraction": digits(fraction)}
            cases.append({"what": "value_loss", "name": mode, "batch": at, **found})
            for norm_length in (None, 11):
                loss = verl.core.agg_loss(b["values"], b["mask"], mode, loss_scale_factor=norm_length)
                cases.append({"what": "aggregate", "name": mode, "batch": at, "norm_length": norm_length, "loss": digits(loss)})
    for base in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        for kind in (base, f"{base}+"):
            b = batches["extreme"]
            x = b["log_probs"].clone().requires_grad_()
            value = verl.core.kl_penalty(x, b["old_log_probs"], kind)
            value.sum().backward()
            assert x.grad is not None
            cases.append({"what": "kl", "name": kind, "batch": "extreme", "value": digits(value), "gradient": digits(x.grad)})
    return cases


def correction_cases(verl: Verl, batches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    every = (
        "token_k1,token_k2,token_k3,seq_sum_k1,seq_sum_k2,seq_sum_k3,seq_mean_k1,seq_mean_k2,seq_mean_k3,seq_max_k2,seq_max_k3"
    )
    options: list[dict[str, Any]] = [
        {},
        {"rollout_is": "token", "rollout_is_threshold": 1.5},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
        *({"rollout_rs": name, "rollout_rs_threshold": "0.7_1.5" if name.endswith("k1") else "0.1"} for name in every.split(",")),
        {
            "rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k1,token_k3,seq_max_k2",
            "rollout_rs_threshold": "0.8_1.3,0.5,0.6",
        },
    ]  # fmt: skip
    cases = []
    for at in ("ragged", "extreme"):
        for given in options:
            b = batches[at]
            compute = verl.correction.compute_rollout_correction_and_rejection_mask
            weights, mask, metrics = compute(b["log_probs"], b["old_log_probs"], b["mask"], **given)
            case = {"what": "rollout_correction", "name": given.get("rollout_rs", given.get("rollout_is", "off")), "batch": at}
            case |= {"options": given, "mask": digits(mask), "metrics": {key: digits(value) for key, value in metrics.items()}}
            if weights is not None:
                case["weights"] = digits(weights.batch["rollout_is_weights"][b["mask"] > 0])
            cases.append(case)
    return cases


def main() -> None:
    stored = {name: batch(name, seed) for seed, name in enumerate(MASKS)}
    PATH.write_text(json.dumps({"batches": stored, "cases": []}))
    batches, _ = load()
    verl = Verl()
    made = [make(verl, batches) for make in (advantage_cases, loss_cases, value_and_kl_cases, correction_cases)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for cases in made for case in cases)
    PATH.write_text(f'{{"batches":{json.dumps(stored, separators=(",", ":"))},\n"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
