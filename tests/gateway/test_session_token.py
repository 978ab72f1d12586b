"""Session tokens and the secret that signs them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import pytest

from polar.session_token import InvalidToken, load_secret, sign, verify
from polar.settings import Settings

SECRET = "a secret of thirty-two characters"


def test_a_token_names_session_and_attempt() -> None:
    token = verify(SECRET, sign(SECRET, "session", 2, 60))
    assert (token.session_id, token.attempt) == ("session", 2)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (sign(SECRET, "s", 0, -1), "expired"),
        (sign(SECRET[::-1], "s", 0, 60), "Signature"),
        (jwt.encode({"sid": "s", "att": 0}, SECRET), "exp"),
        (jwt.encode({"sid": 1, "att": "0", "exp": 9e9}, SECRET), "claims"),
        (jwt.encode({"sid": "s", "att": 0, "exp": 9e9}, None, algorithm="none"), "alg"),
        ("nonsense", "segments"),
    ],
)
def test_a_bad_token_says_why(token: str, why: str) -> None:
    with pytest.raises(InvalidToken, match=why):
        verify(SECRET, token)


def test_processes_that_start_at_once_share_one_secret(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path / "run")
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: load_secret(settings), range(32)))
    assert len(secrets) == 1 and len(secrets.pop()) == 64
    assert stat.S_IMODE((tmp_path / "run" / "session_secret").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["session_secret"]


def test_a_given_secret_is_used_as_it_is(tmp_path: Path) -> None:
    assert load_secret(Settings(run_dir=tmp_path, session_secret=SECRET)) == SECRET
    assert not list(tmp_path.iterdir())
