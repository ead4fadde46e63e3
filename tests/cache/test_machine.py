"""Any order of what can be done to a cache."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.cache.machine import CacheMachine

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
