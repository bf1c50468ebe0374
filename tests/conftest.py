"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines: machines differ and tests share cores. The examples are the same in every run, so that a change alone
# can make a test fail; `make soak` draws new ones, and more.
settings.register_profile("test", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "soak", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))
