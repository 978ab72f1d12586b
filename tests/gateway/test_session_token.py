"""Session tokens and the secret that signs them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.session_token import KNOWN, InvalidToken, _signed, load_secret, sign, verify
from polar.settings import Settings
from schemas.tasks import Budget, SamplingSpec

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


samplings = st.builds(
    SamplingSpec,
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    max_tokens=st.none() | st.integers(1, 2**31),
    stop=st.none() | st.lists(st.text(), max_size=16),
    structured_outputs=st.none() | st.dictionaries(st.sampled_from(["regex", "grammar"]), st.text(), min_size=1),
)
budgets = st.builds(
    Budget,
    calls=st.none() | st.integers(1, 2**31),
    tokens=st.none() | st.integers(1, 2**40),
    concurrent_calls=st.integers(1, 1000),
)


@given(samplings, budgets)
def test_a_token_carries_what_the_task_fixes_and_allows(sampling: SamplingSpec, budget: Budget) -> None:
    token = verify(SECRET, sign(SECRET, "s", 0, 60, sampling=sampling, budget=budget))
    assert (token.sampling, token.budget) == (sampling, budget)


def test_defaults_take_no_room() -> None:
    claims = jwt.decode(sign(SECRET, "s", 0, 60), SECRET, algorithms=["HS256"])
    assert set(claims) == {"sid", "att", "exp"}
    said = sign(SECRET, "s", 0, 60, sampling=SamplingSpec(temperature=1.0), budget=Budget(calls=7))
    claims = jwt.decode(said, SECRET, algorithms=["HS256"])
    assert (claims["smp"], claims["bud"]) == ({"temperature": 1.0}, {"calls": 7})


@pytest.mark.parametrize(
    "more",
    [{"smp": {"temperature": "hot"}}, {"smp": {"colour": 1}}, {"bud": {"calls": 0}}, {"bud": []}, {"exp": "9e9"}],
)
def test_wrong_claims_are_refused(more: dict[str, object]) -> None:
    token = jwt.encode({"sid": "s", "att": 0, "exp": 9e9} | more, SECRET, algorithm="HS256")
    with pytest.raises(InvalidToken, match="claims"):
        verify(SECRET, token)


def test_a_known_token_still_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    token = sign(SECRET, "s", 0, 60)
    assert verify(SECRET, token) is verify(SECRET, token), "its signature is checked once"
    expires = verify(SECRET, token).expires
    monkeypatch.setattr("polar.session_token.time.time", lambda: expires)
    with pytest.raises(InvalidToken, match="expired"):
        verify(SECRET, token)


def test_only_so_many_tokens_are_remembered_and_no_bad_one() -> None:
    _signed.cache_clear()
    with pytest.raises(InvalidToken):
        verify(SECRET, sign(SECRET[::-1], "s", 0, 60))
    assert _signed.cache_info().currsize == 0
    assert _signed.cache_info().maxsize == KNOWN
