"""The bytes of what ``/inference/v1/generate`` answers, streamed and whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from scripted_engine.answers import DONE, Asked, Outcome, Span, encode, prompt_of, spoilt, usage
from scripted_engine.plans import Fault
from scripted_engine.tokens import logprob


@lru_cache(maxsize=256)
def generate_entries(ids: tuple[int, ...], top: int) -> list[dict[str, Any]]:
    return [_ranked(token) | {"top_logprobs": [_ranked(token + n) for n in range(max(top, 1))]} for token in ids]


def _ranked(token: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob(token), "rank": 1 + token % 7}


@lru_cache(maxsize=64)
def _generated(outcome: Outcome, asked: Asked) -> list[bytes]:
    return _generate_choices(outcome, asked, None)


def _generate_choices(outcome: Outcome, asked: Asked, fault: Fault | None) -> list[bytes]:
    """All of each choice but its end, which only the last chunk knows."""
    entries = generate_entries(outcome.ids, asked.top) if asked.top is not None else None
    found, start = [], 0
    for end in outcome.ends:
        last = end == len(outcome.ids)
        due = fault if fault and (start <= fault.after < end or (last and fault.after >= end)) else None
        ids, lines = spoilt(due, outcome.ids[start:end], entries[start:end] if entries is not None else None)
        found.append(_tokens(ids, lines))
        start = end
    return found


def _tokens(ids: Sequence[int] | None, entries: list[Any] | None) -> bytes:
    """Both halves of a choice, with a mark where the weight versions come."""
    logprobs = encode({"content": entries} if entries is not None else None)
    return b'"token_ids":%b,"routed_experts":null,"sampling_mask":null,"weight_versions":\0,"logprobs":%b}' % (
        encode(ids),
        logprobs,
    )


class GenerateAnswer:
    """``/inference/v1/generate``."""

    def __init__(
        self,
        call_id: str,
        model: str,
        prompt: list[int],
        outcome: Outcome,
        asked: Asked,
        fault: Fault | None,
        prompt_logprobs: list[Any] | None = None,
    ) -> None:
        self.call_id, self._model, self._prompt = call_id, model, prompt
        self.outcome, self._asked, self._fault = outcome, asked, fault
        self._prompt_logprobs = prompt_logprobs
        self._head = b'data: {"request_id":"%b","usage":' % call_id.encode()
        self._first = True

    def choices(self) -> list[bytes]:
        if self._fault:
            return _generate_choices(self.outcome, self._asked, self._fault)
        return _generated(self.outcome, self._asked)

    def opening(self) -> bytes:
        return b""

    def event(self, choice: bytes, count: int, last: bool, spans: list[Span]) -> bytes:
        fault, versions = self._fault, b"null"
        if last and not (fault and fault.kind == "no_versions"):
            versions = encode(spans)
        finish, stop = (self.outcome.finish, self.outcome.stop_reason) if last else (None, None)
        if fault and fault.kind == "no_finish":
            finish, versions = None, b"null"
        return self._event(choice, count, encode(finish), encode(stop), versions)

    def _event(self, choice: bytes, count: int, finish: bytes, stop: bytes, versions: bytes) -> bytes:
        prompt = b""
        if self._first and self._asked.ids:
            prompt = b'"prompt_token_ids":%b,' % encode(prompt_of(self._prompt, self._fault))
        self._first = False
        said = encode(usage(len(self._prompt), count)) if self._asked.usage_each else b"null"
        return b'%b%b,%b"output_mode":"tokens","choices":[{"index":0,"finish_reason":%b,"stop_reason":%b,%b]}\n\n' % (
            self._head,
            said,
            prompt,
            finish,
            stop,
            choice.replace(b"\0", versions, 1),
        )

    def aborted(self, count: int, spans: list[Span]) -> bytes:
        choice = _tokens([], [] if self._asked.top is not None else None)
        return self._event(choice, count, b'"abort"', b"null", encode(spans)) + self.closing(count)

    def closing(self, count: int) -> bytes:
        if not self._asked.usage:
            return DONE
        said = encode(usage(len(self._prompt), count, self._fault))
        return self._head + said + b',"output_mode":"tokens","choices":[]}\n\n' + DONE

    def whole(self, count: int, finish: str, spans: list[Span]) -> bytes:
        asked, fault, kept = self._asked, self._fault, self.outcome.ids[:count]
        entries = generate_entries(kept, asked.top) if asked.top is not None else None
        ids, entries = spoilt(fault, kept, entries)
        choice = {
            "index": 0,
            "finish_reason": None if fault and fault.kind == "no_finish" else finish,
            "stop_reason": self.outcome.stop_reason,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None if fault and fault.kind == "no_versions" else spans,
            "logprobs": {"content": entries} if entries is not None else None,
        }
        said = usage(len(self._prompt), count, fault)
        body = {
            "request_id": self.call_id,
            "model": self._model,
            "created": int(time.time()),
            "usage": said | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": self._prompt_logprobs,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt_of(self._prompt, fault) if asked.ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [choice],
        }
        return encode(body)
