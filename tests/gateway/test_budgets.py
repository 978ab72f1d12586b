"""Running calls and what was spent are counted once each, in whatever order calls are admitted, fail and end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gateway_app.budgets import Budgets, OverBudget, Use
from schemas.tasks import Budget

SESSION = ("s", 1)


def refusal(budgets: Budgets, budget: Budget) -> OverBudget:
    with pytest.raises(OverBudget) as error:
        budgets.admit(*SESSION, budget)
    return error.value


def spend(budgets: Budgets, budget: Budget, tokens: int = 0) -> None:
    with budgets.admit(*SESSION, budget) as use:
        use.started()
        use.sampled(tokens)


def test_a_session_may_have_so_many_calls_at_once():
    budgets, budget = Budgets(), Budget(concurrent_calls=2)
    with budgets.admit(*SESSION, budget), budgets.admit(*SESSION, budget):
        error = refusal(budgets, budget)
        assert (error.status, error.code) == (429, "too_many_calls")
        assert "2 calls running" in str(error)
        with budgets.admit("other", 1, budget):
            pass
    spend(budgets, budget)


def test_calls_are_spent_when_they_start():
    budgets, budget = Budgets(), Budget(calls=2)
    for _ in range(5):
        with budgets.admit(*SESSION, budget):
            pass
    spend(budgets, budget)
    spend(budgets, budget)
    error = refusal(budgets, budget)
    assert (error.status, error.code) == (403, "budget_spent")
    assert "2 calls" in str(error)


def test_a_call_that_may_still_start_holds_its_place():
    budgets, budget = Budgets(), Budget(calls=1)
    with budgets.admit(*SESSION, budget):
        assert refusal(budgets, budget).code == "budget_spent"
    spend(budgets, budget)


def test_a_call_that_fails_gives_its_place_back():
    budgets, budget = Budgets(), Budget(concurrent_calls=1)
    with pytest.raises(RuntimeError), budgets.admit(*SESSION, budget):
        raise RuntimeError
    spend(budgets, budget)


def test_sampled_tokens_are_spent_and_what_is_left_is_known():
    budgets, budget = Budgets(), Budget(tokens=10)
    with budgets.admit(*SESSION, budget) as use:
        assert use.tokens_left == 10
        use.sampled(7)
        assert use.tokens_left == 3
    spend(budgets, budget, 3)
    error = refusal(budgets, budget)
    assert (error.status, error.code) == (403, "budget_spent")
    assert "10 tokens" in str(error)
    with budgets.admit("free", 1, Budget()) as use:
        assert use.tokens_left is None


def test_calls_in_flight_may_go_over_the_tokens_and_the_next_is_refused():
    budgets, budget = Budgets(), Budget(tokens=10)
    with budgets.admit(*SESSION, budget) as one, budgets.admit(*SESSION, budget) as other:
        one.sampled(9)
        other.sampled(9)
        assert one.tokens_left == other.tokens_left == 0
    assert refusal(budgets, budget).code == "budget_spent"


def test_after_a_restart_the_calls_go_on_from_the_log():
    budgets, budget = Budgets(), Budget(calls=5)
    budgets.resume({SESSION: 4})
    spend(budgets, budget)
    assert refusal(budgets, budget).code == "budget_spent"


def test_an_ended_attempt_is_forgotten_with_the_lower_ones():
    budgets = Budgets()
    for attempt in (0, 1, 2):
        with budgets.admit("s", attempt, Budget()) as use:
            use.started()
    running = budgets.admit("s", 0, Budget())
    budgets.drop("s", 1)
    assert len(budgets) == 1
    with running:
        pass
    assert len(budgets) == 1


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 5))
def test_memory_is_bounded_and_a_running_call_is_never_forgotten(sessions, remembered):
    budgets, budget = Budgets(remembered), Budget(concurrent_calls=1)
    running = budgets.admit("running", 0, budget)
    for session in sessions:
        with budgets.admit(str(session), 0, budget):
            pass
    assert len(budgets) <= remembered + 1
    with pytest.raises(OverBudget):
        budgets.admit("running", 0, budget)
    with running:
        pass


class BudgetMachine(RuleBasedStateMachine):
    """Against a model that counts by hand: a set of running calls, started calls and tokens for each session."""

    uses = Bundle("uses")

    @initialize(
        concurrent=st.integers(1, 3), calls=st.none() | st.integers(1, 6), tokens=st.none() | st.integers(1, 20)
    )
    def begin(self, concurrent: int, calls: int | None, tokens: int | None) -> None:
        self.budgets = Budgets()
        self.budget = Budget(concurrent_calls=concurrent, calls=calls, tokens=tokens)
        self.running: dict[str, list[Use]] = {"a": [], "b": []}
        self.holding: set[int] = set()
        self.started = {"a": 0, "b": 0}
        self.tokens = {"a": 0, "b": 0}

    @rule(target=uses, session=st.sampled_from("ab"))
    def admit(self, session: str):
        running = self.running[session]
        reserved = sum(id(use) in self.holding for use in running)
        full = len(running) >= self.budget.concurrent_calls
        spent = self.budget.tokens is not None and self.tokens[session] >= self.budget.tokens
        spent |= self.budget.calls is not None and self.started[session] + reserved >= self.budget.calls
        if full or spent:
            with pytest.raises(OverBudget) as error:
                self.budgets.admit(session, 1, self.budget)
            assert error.value.code == ("too_many_calls" if full else "budget_spent")
            return multiple()
        use = self.budgets.admit(session, 1, self.budget).__enter__()
        running.append(use)
        self.holding.add(id(use))
        return (session, use)

    @rule(named=uses)
    def start(self, named) -> None:
        session, use = named
        if id(use) in self.holding:
            self.holding.discard(id(use))
            self.started[session] += 1
        use.started()

    @rule(named=uses, tokens=st.integers(0, 9))
    def sample(self, named, tokens: int) -> None:
        session, use = named
        use.sampled(tokens)
        self.tokens[session] += tokens

    @rule(named=consumes(uses), again=st.booleans())
    def leave(self, named, again: bool) -> None:
        session, use = named
        use.__exit__(None, None, None)
        if again:
            use.__exit__(None, None, None)
        self.holding.discard(id(use))
        self.running[session].remove(use)

    @rule(session=st.sampled_from("ab"))
    def end(self, session: str) -> None:
        """A session that has no running call ends and comes again."""
        if not self.running[session]:
            self.budgets.drop(session, 1)
            self.started[session] = self.tokens[session] = 0

    @invariant()
    def limits_hold(self) -> None:
        for session in getattr(self, "running", ()):
            assert len(self.running[session]) <= self.budget.concurrent_calls
            assert self.budget.calls is None or self.started[session] <= self.budget.calls


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
