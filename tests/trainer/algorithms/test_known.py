import pytest

from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.known import ESTIMATORS, POLICY_LOSSES, check_policy_loss, estimator_needs
from trainer.algorithms.policy_losses import POLICY_LOSSES as REGISTERED


def test_known_names_equal_the_registered_ones() -> None:
    built_in = [name for name in ADVANTAGES if ADVANTAGES[name].__module__ == "trainer.algorithms.advantages"]
    assert {name: ADVANTAGES.needs(name) for name in built_in} == ESTIMATORS
    assert {name for name in REGISTERED if REGISTERED[name].__module__ == "trainer.algorithms.policy_losses"} == POLICY_LOSSES


def test_unknown_names_are_looked_up_in_the_registries() -> None:
    with pytest.raises(ValueError, match=r"adv_estimator=grppo is not known \(did you mean grpo\?\)"):
        estimator_needs("grppo")
    with pytest.raises(ValueError, match=r"loss_mode=vanila is not known \(did you mean vanilla\?\)"):
        check_policy_loss("vanila")
