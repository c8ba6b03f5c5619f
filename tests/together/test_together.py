"""The cores together: whatever dies whenever, every step is done, every group is trained once, no execution is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.together.cluster import BATCH, STEPS, Cluster


def ended(cluster: Cluster) -> None:
    trained = [i for batch in cluster.core.weights for i in batch]
    groups = Counter(i.rpartition(".")[0] for i in trained)
    assert cluster.scheduler.version.step == STEPS == len(cluster.core.weights)
    assert len(trained) == len(set(trained)), "a micro-step was trained twice"
    assert len(groups) == STEPS * BATCH
    for name, steps in groups.items():
        assert steps == len(cluster.trajd.ledger.lots.groups[name].steps), f"only a part of {name} was trained"
        assert sum(any(i.startswith(f"{name}.") for i in batch) for batch in cluster.core.weights) == 1
    assert not cluster.scheduler.ledger.in_flight
    up = [cell for cell in cluster.cells.values() if cell.up]  # nobody waits for one that is down just now
    assert up and all(cell.engine.version == cluster.core.version for cell in up)


@pytest.mark.parametrize("policy", ["elastic", "colocate", "async"])
@given(seed=st.integers(0, 10**6), cells=st.integers(2, 4), shards=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_an_undisturbed_run_is_done_and_nothing_is_tried_again(policy, seed, cells, shards):
    cluster = Cluster(seed, policy=policy, cells=cells, shards=shards).run()
    ended(cluster)
    assert cluster.scheduler.ledger.retries == 0


@pytest.mark.parametrize("policy", ["elastic", "colocate", "async"])
@given(seed=st.integers(0, 10**6), cells=st.integers(2, 4), shards=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_any_process_may_die_at_any_time(policy, seed, cells, shards):
    ended(Cluster(seed, policy=policy, cells=cells, faults=6, shards=shards).run())
