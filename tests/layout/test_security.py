"""What docs/security.md promises and a look at the source can hold: no pickle from disk, no code that nobody asked for."""

import ast
from pathlib import Path

import pytest
import yaml

from tests.layout.source import PACKAGES, ROOT, parse, python_files

TREES = (*PACKAGES, "scripts")
# Calls that run code of what they read. Modules whole, or single functions.
LOADERS = {
    "pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "torch.jit.load", "torch.hub.load",
    "numpy.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "eval", "exec",
}  # fmt: skip
# (file, call) -> where the bytes come from.
ALLOWED = {
    ("trainer/data/processes.py", "pickle.load"): "rows and tokens, between a process and those that it started",
    ("workers/controller/rpc.py", "pickle.loads"): "Ray, between processes of one run",
    ("trainer/rewards/pool/worker.py", "pickle.load"): "the socket that its parent made for it",
    ("configs/compat/translate.py", "yaml.load"): "our own YAML, by a safe loader",
    ("trainer/rewards/sandbox/sandbox.py", "exec"): "the answer to be scored, confined (trainer/rewards/sandbox/seccomp.py)",
    ("trainer/rewards/sandbox/assertions.py", "exec"): "the data set's assertions, confined alike",
}
WRITERS = {"dumps", "dump", "Pickler", "PickleBuffer", "register_pickle_by_value"}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """(name as it would be without an alias, call) of every call in a file."""
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


def test_the_rule_knows_a_loader_by_any_name(tmp_path: Path) -> None:
    file = tmp_path / "sly.py"
    file.write_text(
        "import numpy as np\nfrom torch import load as read\nread('x')\nnp.load('x')\nimport pickle\npickle.dumps(1)\n"
    )
    assert [name for name, _ in calls(file) if loads_code(name)] == ["torch.load", "numpy.load"]


def test_nothing_that_is_read_runs_code() -> None:
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


def test_a_models_own_code_runs_only_where_its_key_says_so() -> None:
    """Every loader is told, and is told what the configuration says."""
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
                said = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "trust_remote_code"]
                otherwise += [f"{path}:{v.lineno}" for v in said if not ast.unparse(v).endswith("trust_remote_code")]
    assert [place for place in silent if not place.startswith("data_preprocess/")] == []
    assert otherwise == []


@pytest.mark.parametrize("root", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_a_models_own_code_is_off_by_default(root: str) -> None:
    text = (ROOT / "configs" / root).read_text()
    lines = [line for line in text.splitlines() if line.strip().startswith("trust_remote_code:")]
    assert all(line.split("#")[0].split(":")[1].strip() == "false" for line in lines)
    assert root == "compat.yaml" or yaml.safe_load(text)


def test_security_has_its_pages() -> None:
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
