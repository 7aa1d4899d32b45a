"""The token of a run."""

import pytest

from evergrad_coordinator.secret import is_token


@pytest.mark.parametrize("said", ["", "secre", "secret ", "\ud800", "sécret"])
def test_only_the_token_itself_is_the_token(said: str) -> None:
    assert not is_token(said, "secret")
    assert is_token("secret", "secret")


def test_a_run_without_a_token_admits_nobody() -> None:
    assert not is_token("", "")
