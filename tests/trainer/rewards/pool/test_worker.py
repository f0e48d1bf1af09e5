from pathlib import Path

import pytest

from trainer.rewards.pool.worker import load_function


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_loads_a_function_by_path_and_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "math.py",  # named as a standard module: neither may hide the other
        "from __future__ import annotations\nimport math\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Result:\n    value: float\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return Result(math.sqrt(len(solution_str))).value\n",
    )
    assert load_function(path, "compute_score", {})("s", "four", "", {}) == 2.0


def test_further_arguments_of_the_configuration_reach_the_function(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rewards.py",
        "def f(data_source, solution_str, ground_truth, extra_info, scale): return scale * len(solution_str)",
    )
    given = {"data_source": "s", "solution_str": "four", "ground_truth": "", "extra_info": {}}
    assert load_function(path, "f", {"scale": 0.5})(**given) == 2.0
    with pytest.raises(ValueError, match="reward_kwargs: extra_info, solution_str is passed with every response"):
        load_function(path, "f", {"scale": 1.0, "solution_str": "", "extra_info": {}})


@pytest.mark.parametrize(
    ("head", "kwargs", "message"),
    [
        ("response, answer", {}, "missing a required argument: 'response'"),
        ("data_source, solution_str, ground_truth", {}, "got an unexpected keyword argument 'extra_info'"),
        ("data_source, solution_str, ground_truth, extra_info, scale", {}, "missing a required argument: 'scale'"),
        ("data_source, solution_str, ground_truth, extra_info", {"scale": 1}, "got an unexpected keyword argument 'scale'"),
    ],
)
def test_function_with_other_arguments_is_refused_before_a_call(
    head: str, kwargs: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "rewards.py", f"def f({head}): raise AssertionError")
    with pytest.raises(ValueError) as error:
        load_function(path, "f", kwargs)
    names = ", ".join(["data_source", "extra_info", "ground_truth", "solution_str", *kwargs])
    assert str(error.value) == f"reward.custom_reward_function.path={path}: f must take {names} as keywords: {message}"


def test_function_with_keyword_arguments_is_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "rewards.py", "def f(ground_truth, **row): return 1.0")
    assert load_function(path, "f", {"scale": 1})(ground_truth="") == 1.0


def test_batch_function_is_recognized_by_its_argument(tmp_path: Path) -> None:
    path = write(tmp_path / "rewards.py", "def f(solution_strs, scale, **rest): return [scale] * len(solution_strs)")
    assert load_function(path, "f", {"scale": 2})(solution_strs=["", ""]) == [2, 2]
    with pytest.raises(ValueError, match="reward_kwargs: extra_infos is passed with every response"):
        load_function(path, "f", {"scale": 1, "extra_infos": 1})
    path = write(tmp_path / "others.py", "def f(solution_strs, ground_truth): ...")
    names = "data_sources, extra_infos, ground_truths, solution_strs"
    with pytest.raises(ValueError, match=f"f must take {names} as keywords: missing a required argument: 'ground_truth'"):
        load_function(path, "f", {})
