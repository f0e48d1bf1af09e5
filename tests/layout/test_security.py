"""Promises of docs/security.md that the source can prove: no pickle from disk, no model code without its key."""

import ast
from pathlib import Path

import pytest
import yaml

from tests.layout.source import PACKAGES, ROOT, parse, python_files

TREES = (*PACKAGES, "scripts")
# Calls that can execute code in the data that they read: whole modules, or single functions.
LOADERS = {
    "pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "torch.jit.load", "torch.hub.load",
    "numpy.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "eval", "exec",
}  # fmt: skip
# (file, call) -> the source of the bytes.
ALLOWED = {
    ("trainer/data/processes.py", "pickle.load"): "rows and tokens, between a process and its children",
    ("trainer/agents/sessions/process.py", "pickle.loads"): "a socket made by its parent",
    ("trainer/agents/sessions/pool.py", "pickle.loads"): "agent processes that it started, with the user's own tools",
    ("workers/controller/rpc.py", "pickle.loads"): "Ray, between processes of one run",
    ("trainer/rewards/pool/worker.py", "pickle.load"): "a socket made by its parent",
    ("configs/compat/translate.py", "yaml.load"): "YAML of this repository, by a safe loader",
    ("trainer/rewards/sandbox/sandbox.py", "exec"): "the response to be scored, confined (trainer/rewards/sandbox/seccomp.py)",
    ("trainer/rewards/sandbox/assertions.py", "exec"): "the data set's assertions, confined in the same way",
}
WRITERS = {"dumps", "dump", "Pickler", "PickleBuffer", "register_pickle_by_value"}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """(name with aliases resolved, call) of every call in a file."""
    aliases: dict[str, str] = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            found.append((f"{aliases.get(first, first)}{'.' if rest else ''}{rest}", node))
    return found


def loads_code(name: str) -> bool:
    module, _, function = name.rpartition(".")
    return name in LOADERS or (module in LOADERS and function not in WRITERS)


def test_loaders_are_found_under_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "sly.py"
    file.write_text(
        "import numpy as np\nfrom torch import load as read\nread('x')\nnp.load('x')\nimport pickle\npickle.dumps(1)\n"
    )
    assert [name for name, _ in calls(file) if loads_code(name)] == ["torch.load", "numpy.load"]


def test_no_other_call_executes_data() -> None:
    found = {(str(path), name) for path in python_files(*TREES) for name, _ in calls(path) if loads_code(name)}
    assert found == ALLOWED.keys()


def test_no_command_goes_through_a_shell() -> None:
    shells = [
        f"{path}:{call.lineno}"
        for path in python_files(*TREES)
        for name, call in calls(path)
        if name in ("os.system", "os.popen") or any(word.arg == "shell" for word in call.keywords)
    ]
    assert shells == []


def test_code_of_a_model_runs_only_if_its_key_is_set() -> None:
    """Every loader gets trust_remote_code from the configuration."""
    silent, otherwise = [], []
    for path in python_files(*PACKAGES):
        for name, call in calls(path):
            words = {word.arg: word.value for word in call.keywords}
            reads_hub = name.endswith((".from_pretrained", ".from_config")) and "GenerationConfig" not in name
            if reads_hub and "trust_remote_code" not in words:
                silent.append(f"{path}:{call.lineno}")
            if "trust_remote_code" in words and not ast.unparse(words["trust_remote_code"]).endswith("trust_remote_code"):
                otherwise.append(f"{path}:{call.lineno}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "trust_remote_code"]
                otherwise += [f"{path}:{v.lineno}" for v in values if not ast.unparse(v).endswith("trust_remote_code")]
    assert [place for place in silent if not place.startswith("data_preprocess/")] == []
    assert otherwise == []


@pytest.mark.parametrize("root", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_code_of_a_model_is_off_by_default(root: str) -> None:
    text = (ROOT / "configs" / root).read_text()
    lines = [line for line in text.splitlines() if line.strip().startswith("trust_remote_code:")]
    assert all(line.split("#")[0].split(":")[1].strip() == "false" for line in lines)
    assert root == "compat.yaml" or yaml.safe_load(text)


def test_security_policy_links_its_page() -> None:
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
