"""Names of the built-in estimators and losses, for configuration checks without importing torch.

Importing torch takes longer than everything before it, and a misspelt name should fail at once. Other names, also those of a
user's file, are looked up in the registries.
"""

ESTIMATORS = {name: frozenset[str]() for name in (
    "reinforce", "reinforce_plus_plus", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg",
)} | {
    "gae": frozenset({"values"}), "remax": frozenset({"baselines"}), "gdpo": frozenset({"rewards"}),
    "optimal_token_baseline": frozenset({"sum_pi_squared"}),
}  # fmt: skip
"""Built-in estimators and their inputs beyond the rewards; see advantages.py."""
POLICY_LOSSES = frozenset({
    "vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "reinforce", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov",
})  # fmt: skip


def estimator_needs(name: str) -> frozenset[str]:
    """Inputs that the estimator needs beyond the rewards. Raises ValueError for an unknown name."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    from trainer.algorithms.advantages import ADVANTAGES

    return ADVANTAGES.needs(name)


def check_policy_loss(name: str) -> None:
    """Raise ValueError for an unknown policy loss."""
    if name not in POLICY_LOSSES:
        from trainer.algorithms import policy_losses

        policy_losses.POLICY_LOSSES[name]
