import pytest

from trainer.rewards.rules.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed 5$ more", "5"),
        (r"\boxed 5 more", "5"),
        (r"\boxed{1} then \boxed 2", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x>0\right\}}", r"\left\{x \mid x>0\right\}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),  # an escaped brace has no partner to wait for
        (r"\boxed{\}} }", r"\}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),  # the last one counts, and it stays open
        (r"\boxed", None),
        (r"\boxedx{1}", None),
        ("5", None),
        ("", None),
        (r"\boxed{" + "1" * 3000 + "}", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    boxed = last_boxed(text)
    assert (None if boxed is None else boxed.content) == content


def test_last_boxed_reports_its_position() -> None:
    boxed = last_boxed(r"12\boxed{5}")
    assert boxed is not None and boxed.start == 2
