from __future__ import annotations

from tandem.cluster.restarts import WINDOW_S, RestartBudget


def test_deaths_in_quick_succession_use_the_budget_up() -> None:
    budget, seen = RestartBudget(max_restarts=2), []
    for _ in range(10):
        budget.died(lived_s=1.0)
        seen.append((budget.is_used_up, budget.delay_s))
    assert seen[:3] == [(False, 1.0), (False, 1.0), (True, 2.0)]
    assert [delay_s for _, delay_s in seen[3:]] == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_worker_that_served_for_a_while_is_forgiven() -> None:
    budget = RestartBudget(max_restarts=2)
    for _ in range(50):
        budget.died(lived_s=WINDOW_S / 2)
        assert not budget.is_used_up, "never three deaths within the window and a bit"
        budget.died(lived_s=WINDOW_S)


def test_starts_that_fail_count_however_long_they_take() -> None:
    budget = RestartBudget(max_restarts=3)
    for _ in range(4):
        budget.died(lived_s=0.0)
    assert budget.is_used_up
    budget.died(lived_s=WINDOW_S + 1)
    assert (budget.num_deaths, budget.is_used_up) == (1, False)
