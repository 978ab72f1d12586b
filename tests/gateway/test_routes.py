"""Every way in which a program may spell a path gives its operation; everything else a refusal, never an exception."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.routes import Refusal, Target, resolve
from polar.session_token import sign

SECRET = "a secret of thirty-two characters"
TOKEN = sign(SECRET, "one", 1, 60)
OTHER = sign(SECRET, "two", 1, 60)

CHAT, MESSAGES, RESPONSES, GOOGLE = "openai.chat", "anthropic.messages", "openai.responses", "google.generate"
DIALECTS = {CHAT, MESSAGES, RESPONSES, GOOGLE}


def to(method: str, path: str, query: str = "", **headers: str) -> Target | Refusal:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return resolve(method, path, query, named)


@pytest.mark.parametrize("version", ["/v1", "", "/v1/v1", "//v1/", "/v1//"])
@pytest.mark.parametrize("ending", ["", "/", "//"])
@pytest.mark.parametrize(
    ("path", "dialect", "operation"),
    [
        ("chat/completions", CHAT, "sample"),
        ("chat//completions", CHAT, "sample"),
        ("messages", MESSAGES, "sample"),
        ("messages/count_tokens", MESSAGES, "count"),
        ("responses", RESPONSES, "sample"),
    ],
)
def test_a_post_is_found_however_it_is_spelled(version, ending, path, dialect, operation):
    target = to("POST", f"/s/{TOKEN}{version}/{path}{ending}", "beta=true")
    assert target == Target(TOKEN, dialect, operation)


@pytest.mark.parametrize("version", ["/v1beta", "/v1", "", "/v1beta/v1beta", "/v1/v1beta", "/v1alpha"])
@pytest.mark.parametrize("model", ["policy", "org/model", "org/model:7b", "räksmörgås", "a b"])
@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    ("verb", "operation", "streamed"),
    [("generateContent", "sample", False), ("streamGenerateContent", "sample", True), ("countTokens", "count", False)],
)
def test_google_has_model_and_streaming_in_the_url(version, model, encoded, verb, operation, streamed):
    name = quote(model, safe="") if encoded else model
    target = to("POST", f"/s/{TOKEN}{version}/models/{name}:{verb}", "alt=sse")
    assert target == Target(TOKEN, GOOGLE, operation, model, streamed)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("path", "dialect", "model"),
    [
        ("/v1/models", CHAT, None),
        ("/models", CHAT, None),
        ("/v1beta/models", GOOGLE, None),
        ("/v1/v1beta/models/", GOOGLE, None),
        ("/v1/models/org/m", CHAT, "org/m"),
        ("/v1beta/models/m", GOOGLE, "m"),
    ],
)
def test_models_are_listed_in_the_shape_of_the_version(method, path, dialect, model):
    assert to(method, path) == Target(None, dialect, "models", model)
    assert to(method, f"/s/{TOKEN}{path}") == Target(TOKEN, dialect, "models", model)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["", "/", "//", "/v1", "/v1beta/", "/api/hello", "/api/hello/"])
def test_the_base_says_hello(method, path):
    for prefix, token in (("", None), (f"/s/{TOKEN}", TOKEN)):
        target = to(method, prefix + path)
        assert isinstance(target, Target) and (target.operation, target.token) == ("hello", token)


@pytest.mark.parametrize(
    ("method", "path", "dialect"),
    [
        ("POST", "/v1/completions", CHAT),
        ("POST", "/v1/embeddings", CHAT),
        ("POST", "/v1/chat", CHAT),
        ("POST", "/v1/chat/completions/x", CHAT),
        ("GET", "/v1/files", CHAT),
        ("POST", "/v1/batches", CHAT),
        ("POST", "/v1/images/generations", CHAT),
        ("POST", "/v1/responses/compact", RESPONSES),
        ("GET", "/v1/responses/resp_1", RESPONSES),
        ("POST", "/v1/messages/batches", MESSAGES),
        ("POST", "/v1/complete", MESSAGES),
        ("POST", "/api/event_logging/batch", MESSAGES),
        ("POST", "/v1beta/models/m:embedContent", GOOGLE),
        ("POST", "/v1beta/models/:generateContent/", GOOGLE),
        ("POST", "/v1beta/cachedContents", GOOGLE),
        ("POST", "/v1beta/chat/completion", GOOGLE),
    ],
)
def test_what_there_is_not_is_never_taken_for_chat(method, path, dialect):
    refusal = to(method, f"/s/{TOKEN}{path}")
    assert isinstance(refusal, Refusal)
    assert refusal.dialect == dialect
    assert (refusal.status, refusal.code) in {(404, "not_found"), (405, "method_not_allowed")}
    assert "\n" not in refusal.message


@pytest.mark.parametrize(
    ("method", "path", "dialect"),
    [
        ("GET", "/v1/chat/completions", CHAT),
        ("GET", "/v1/responses", RESPONSES),
        ("PUT", "/v1/messages", MESSAGES),
        ("GET", "/v1beta/models/m:generateContent", GOOGLE),
        ("POST", "/v1/models", CHAT),
        ("DELETE", "/v1beta/models/m", GOOGLE),
        ("POST", "/", CHAT),
        ("POST", "/api/hello", MESSAGES),
    ],
)
def test_a_wrong_method_is_said_to_be_one(method, path, dialect):
    refusal = to(method, f"/s/{TOKEN}{path}")
    assert isinstance(refusal, Refusal) and (refusal.status, refusal.dialect) == (405, dialect)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime", "/"])
@pytest.mark.parametrize("name", ["websocket", "WebSocket"])
def test_an_upgrade_is_refused_so_that_the_program_falls_back_at_once(path, name):
    refusal = to("GET", f"/s/{TOKEN}{path}", upgrade=name, connection="Upgrade")
    assert isinstance(refusal, Refusal) and refusal.status == 426


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", {"authorization": f"Bearer {TOKEN}"}),
        ("", {"authorization": f"bearer  {TOKEN}"}),
        ("", {"x_api_key": TOKEN}),
        ("", {"x_goog_api_key": TOKEN}),
        (f"alt=sse&key={TOKEN}", {}),
        ("", {"authorization": "Bearer sk-other", "x_goog_api_key": TOKEN}),
    ],
)
def test_a_program_that_only_carries_a_key_has_the_token_there(query, headers):
    assert to("POST", "/v1/messages", query, **headers) == Target(TOKEN, MESSAGES, "sample")
    assert to("GET", "/v1/models", query, **headers) == Target(TOKEN, CHAT, "models")


def test_the_path_wins_over_a_key_that_is_none_of_ours():
    for key in ("polar", "sk-a.b.c", "a.b.c", f"{TOKEN[:-4]}AAAA", TOKEN):
        assert to("POST", f"/s/{TOKEN}/v1/messages", x_api_key=key) == Target(TOKEN, MESSAGES, "sample")


@pytest.mark.parametrize("key", [OTHER, sign(SECRET, "one", 2, 60)])
@pytest.mark.parametrize("name", ["authorization", "x_api_key", "x_goog_api_key"])
def test_a_key_of_another_session_is_refused(key, name):
    value = f"Bearer {key}" if name == "authorization" else key
    for operation in ("messages", "models/m:generateContent"):
        refusal = to("POST", f"/s/{TOKEN}/v1/{operation}", **{name: value})
        assert isinstance(refusal, Refusal) and (refusal.status, refusal.code) == (401, "invalid_session_token")
        assert key not in refusal.message and TOKEN not in refusal.message
    refusal = to("GET", f"/s/{TOKEN}/v1/models", f"key={OTHER}")
    assert isinstance(refusal, Refusal) and refusal.status == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/s/", "/s"])
def test_without_a_token_nothing_is_sampled(path):
    refusal = to("POST", path)
    assert isinstance(refusal, Refusal) and refusal.status in (401, 404, 405)


def test_a_key_that_is_no_token_is_left_to_the_signature_check():
    assert to("POST", "/v1/responses", x_api_key="sk-1") == Target("sk-1", RESPONSES, "sample")


def test_headers_may_be_text():
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert resolve("POST", "/v1/responses", "", headers) == Target(TOKEN, RESPONSES, "sample")


plain = f"s {TOKEN} {OTHER} v1 v1beta chat completions messages count_tokens responses models api hello embeddings"
odd = ["m:generateContent", "m%2Fn:streamGenerateContent", ":countTokens", "", "%", "%ff"]
words = st.sampled_from([*plain.split(), *odd])
paths = st.lists(words | st.text(max_size=6), max_size=8).map("/".join) | st.text()
values = st.sampled_from([TOKEN, OTHER, f"Bearer {OTHER}", "Bearer", "a.b.c", "..", "websocket"]) | st.text(max_size=20)
names = st.sampled_from(["authorization", "x-api-key", "x-goog-api-key", "upgrade", "anthropic-version", "other"])
methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]) | st.text(max_size=5)


@given(methods, paths, st.text(max_size=30) | st.just(f"key={OTHER}"), st.dictionaries(names, values))
def test_anything_gives_a_target_or_a_refusal(method, path, query, headers):
    found = resolve(method, path, query, headers)
    if all(value.isascii() for value in headers.values()):
        assert found == resolve(method, path, query, {n.encode(): v.encode() for n, v in headers.items()})
    assert found.dialect in DIALECTS
    if isinstance(found, Refusal):
        assert found.status in (401, 404, 405, 426) and found.message and len(found.message) < 300
        return
    assert headers.get("upgrade", "").lower() != "websocket"
    if found.operation in ("sample", "count"):
        assert method == "POST" and found.token
        assert (found.model is not None) == (found.dialect == GOOGLE)
    else:
        assert method in ("GET", "HEAD") and not found.streamed


@given(st.sampled_from(["completions", "embeddings", "rerank", "files", "batches", "audio", "moderations"]), paths)
def test_other_endpoints_are_never_sampled(first, rest):
    assert isinstance(to("POST", f"/s/{TOKEN}/v1/{first}/{rest}"), Refusal)
