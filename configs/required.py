"""Required keys: those with the value ``???`` in a root YAML, as Hydra marks them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from configs.base.keys import CONFIG_DIR, bare_type, described, keys_of

REQUIRED = "???"
UNSET = ""
"""Value of a required key that is not set, in a configuration and in the keys that refer to it."""
SHORT_FOR = {"model": "actor_rollout_ref.model.path"}
"""Keys that may be set in place of the required key."""


def without_marks(tree: Mapping[str, Any], schema: type, prefix: str = "") -> dict[str, Any]:
    """A copy of ``tree`` with UNSET in place of REQUIRED: OmegaConf does not resolve references to a key that is ???."""
    leaves = keys_of(schema).leaves
    return {
        name: without_marks(value, schema, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else UNSET
        if value == REQUIRED and bare_type(leaves.get(f"{prefix}{name}")) is str
        else value
        for name, value in tree.items()
    }


def required_keys(root: str) -> dict[str, str]:
    """{required key: its comment} of configs/{root}.yaml."""
    leaves = described(CONFIG_DIR / f"{root}.yaml")
    return {key: leaf.comment for key, leaf in leaves.items() if leaf.value == REQUIRED}


def unset_keys(config: Any, root: str) -> Iterator[str]:
    """One line for each key that configs/{root}.yaml requires and ``config`` does not set; none for a disabled block."""
    plain = asdict(config)
    for key, comment in required_keys(root).items():
        block = plain[key.split(".")[0]]
        is_disabled = isinstance(block, Mapping) and block.get("enable") is False
        names = (key, SHORT_FOR[key]) if key in SHORT_FOR else (key,)
        if not is_disabled and all(_at(plain, name) == UNSET for name in names):
            yield f"{key}: must be set, for example {key}=Qwen/Qwen3-0.6B ({comment.partition(';')[0].rstrip('.')})"


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree
