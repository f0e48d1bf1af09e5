"""Estimators and losses that are ours, by name: a configuration that names these is checked before torch is loaded, which takes
longer than all that comes before. Others, a user's own among them, are looked up where they are registered.
"""

ESTIMATORS = {name: frozenset[str]() for name in (
    "reinforce", "reinforce_plus_plus", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg",
)} | {
    "gae": frozenset({"values"}), "remax": frozenset({"baselines"}), "gdpo": frozenset({"rewards"}),
    "optimal_token_baseline": frozenset({"sum_pi_squared"}),
}  # fmt: skip
"""What each needs beyond the rewards: see advantages.py."""
POLICY_LOSSES = frozenset({
    "vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "reinforce", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov",
})  # fmt: skip


def estimator_needs(name: str) -> frozenset[str]:
    """Raises ValueError for a name that nobody knows."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    from trainer.algorithms.advantages import ADVANTAGES

    return ADVANTAGES.needs(name)


def check_policy_loss(name: str) -> None:
    """Raises ValueError for a name that nobody knows."""
    if name not in POLICY_LOSSES:
        from trainer.algorithms import policy_losses

        policy_losses.POLICY_LOSSES[name]
