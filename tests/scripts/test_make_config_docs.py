"""The generated reference pages are up to date with the configuration."""

from configs.base.keys import CONFIG_DIR, described, keys_of
from configs.compat.translate import compat
from configs.schema.ppo import PPOConfig
from scripts.make_config_docs import CONFIG_PAGE, PROGRAMS, VERL_PAGE, config_page, verl_page

WRITE = "run python -m scripts.make_config_docs"


def test_page_of_all_keys_is_up_to_date() -> None:
    assert CONFIG_PAGE.read_text(encoding="utf-8") == config_page(), WRITE


def test_every_key_of_every_program_has_a_description() -> None:
    page = config_page()
    rows = {line.split("` | `")[0][3:]: line for line in page.splitlines() if line.startswith("| `")}
    for root in PROGRAMS:
        for key in described(CONFIG_DIR / f"{root}.yaml"):
            assert not rows[key].endswith("|  |"), key
    assert keys_of(PPOConfig).leaves.keys() <= rows.keys()


def test_page_of_verls_keys_is_up_to_date() -> None:
    page = verl_page()
    assert VERL_PAGE.read_text(encoding="utf-8") == page, WRITE
    refused = page.partition("## Refused")[2]
    limited = [key for key, entry in compat().accepted.items() if entry.cases[0].values is not None]
    assert len(limited) > 60 and all(f"| `{key}` |" in refused for key in (*limited, *compat().refused))
