"""A session's calls as ``polar show`` prints them."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from polar.cli.look import sampling_words, turn_facts, turn_head
from polar.store.rows import CallRow
from schemas.sessions import Sampling


def row(**changes) -> CallRow:
    fields: dict[str, Any] = dict.fromkeys(CallRow.__struct_fields__)
    fields |= {"number": 3, "attempt": 1, "state": "delivered", "kept_ids": 40, "new_prompt_tokens": 12}
    fields |= {"call_id": "c3", "at": datetime(2026, 1, 2, tzinfo=UTC), "versions": [], "history": "template"}
    return CallRow(**(fields | {"sampling": msgspec.to_builtins(Sampling())} | changes))


def test_the_head_says_how_much_was_known_and_the_rule_of_an_auxiliary_call():
    assert turn_head(row()) == "turn 3 #1 (delivered): 12 prompt tokens after 40 known"
    sampled = row(kept_ids=0, response_tokens=5, versions=[{"version": 2, "start": 0, "end": 5}])
    assert turn_head(sampled) == "turn 3 #1 (delivered): 12 prompt tokens, 5 sampled by v2"
    auxiliary = row(kept_ids=None, new_prompt_tokens=None, state="started", auxiliary="codex.compaction")
    assert turn_head(auxiliary) == "turn 3 #1 (started, auxiliary: codex.compaction): prompt not told"


def test_the_facts_say_whose_turn_it_goes_on_from_and_why_its_history_is_no_exact_one():
    assert turn_facts(row(), {}) == "template history, temperature 1"
    exact = row(parent_call_id="c2", thread_id="explorer", history="exact")
    assert turn_facts(exact, {"c2": 2}) == "after turn 2, thread explorer, exact history, temperature 1"
    noted = row(parent_call_id="elsewhere", history_note="images")
    assert turn_facts(noted, {"c2": 2}) == "after call elsewhere, template history (images), temperature 1"
    assert turn_facts(row(history=None), {}) == "temperature 1"


def test_only_sampling_that_is_not_neutral_is_named():
    assert sampling_words(Sampling()) == "temperature 1"
    cut = Sampling(temperature=0.7, top_p=0.9, top_k=20, max_tokens=64, stop=["\n\n"], altered=["logit_bias", "seed"])
    words = "temperature 0.7, top_p 0.9, top_k 20, max_tokens 64, stop ['\\n\\n'], also logit_bias seed"
    assert sampling_words(cut) == words
