"""configs/schema: types and checks, no defaults. Defaults are set only in YAML."""

import ast

from tests.layout.source import parse, python_files

DERIVED = {"Pool", "Placement"}
"""Classes that are computed from blocks; the command line does not fill them."""
CLASSES = [
    (path, node)
    for path in python_files("configs/schema")
    for node in ast.walk(parse(path))
    if isinstance(node, ast.ClassDef)
    and node.name not in DERIVED
    and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
]


def test_schema_has_no_defaults() -> None:
    found = [
        f"{path}:{field.lineno} {ast.unparse(field)}"
        for path, node in CLASSES
        for field in node.body
        if isinstance(field, ast.AnnAssign | ast.Assign) and field.value is not None
    ]
    assert CLASSES and found == []


def test_schema_classes_are_frozen_with_slots_and_keywords() -> None:
    wanted = {"slots", "kw_only", "frozen"}
    for path, node in CLASSES:
        given = {
            keyword.arg
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call)
            for keyword in decorator.keywords
            if isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        }
        assert wanted <= given, f"{path}: {node.name} lacks {wanted - given}"
