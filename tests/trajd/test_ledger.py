"""The ledger's promises, one by one. What it promises over all orders of faults is in test_ledger_faults.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gyre_base.messages import (
    BatchComplete,
    Contribution,
    Done,
    GroupClosed,
    LeaseReturned,
    MicroStepLease,
    NoMicroStep,
    Refused,
    StaleWeights,
)
from tests.trajd.builders import applied, claim, closed, computed, ledger, lost, packed, word
from trajtools.trajd.events import Holder
from trajtools.trajd.ledger import MicroStepLedger
from trajtools.trajd.lots import LedgerBroken
from trajtools.trajd.trained import TrainedRanges


def lease(id: str, batch: int = 0, base: str = "0.0") -> MicroStepLease:
    return MicroStepLease(batch=batch, id=id, base_version=base, layout={}, payload=b"")


def compute_all(book: MicroStepLedger, cell: str = "c0", version: str = "0.0") -> tuple[str, ...]:
    """One cell computes the whole open batch; returns its ids."""
    batch, done = book.open_batch, ()
    while isinstance(answer := book.claim(claim(cell, done, version=version, batch=batch)), MicroStepLease):
        book.compute(computed(cell, answer.id, batch=batch))
        done = (*done, answer.id)
    return done


def test_nothing_is_leased_before_the_core_has_spoken():
    book = MicroStepLedger(1)
    book.close(closed("g"))
    book.pack(packed("g"))
    assert isinstance(book.claim(claim("c1")), NoMicroStep)


def test_micro_steps_are_leased_as_soon_as_the_first_group_of_the_batch_is_packed():
    book = ledger("g0", size=4)
    assert book.claim(claim("c0")) == lease("g0.0")
    assert book.claim(claim("c1")) == lease("g0.1")
    assert isinstance(book.claim(claim("c2")), NoMicroStep)


def test_without_streaming_nothing_is_leased_before_all_groups_of_the_batch_are_packed():
    book = MicroStepLedger(2, streaming=False)
    book.restore(word(0, "0.0"))
    for name in ("g0", "g1"):
        assert isinstance(book.claim(claim("c0")), NoMicroStep)
        book.close(closed(name))
        book.pack(packed(name))
    assert book.claim(claim("c0")) == lease("g0.0")
    assert book.claim(claim("c1")) == lease("g0.1")


def test_a_batch_is_a_lot_of_groups_in_the_order_of_closing_not_of_packing():
    book = ledger(size=1)
    book.close(closed("late", serial=7))
    book.close(closed("early", serial=3))
    book.pack(packed("early"))
    assert isinstance(book.claim(claim("c0")), NoMicroStep)
    book.pack(packed("late"))
    assert book.open_ids == ["late.0", "late.1"]


def test_a_group_with_too_few_valid_executions_takes_no_place():
    book = ledger("g0", size=2)
    book.close(closed("poor"))
    book.pack(packed("poor", enough=False))
    book.close(closed("g1"))
    book.pack(packed("g1"))
    assert book.open_ids == ["g0.0", "g0.1", "g1.0", "g1.1"]


def test_a_claim_from_other_weights_is_sent_to_pull():
    book = ledger("g0", version="1.4")
    assert book.claim(claim("c1", version="0.9")) == StaleWeights(version="1.4")
    assert book.claim(claim("c1", version="")) == StaleWeights(version="1.4")


def test_newer_weights_than_the_ledger_knows_wait_for_the_note_of_their_step():
    assert isinstance(ledger("g0").claim(claim("c1", version="0.1")), NoMicroStep)


def test_a_repeated_claim_gets_the_same_lease():
    book = ledger("g0")
    assert book.claim(claim("c0")) == book.claim(claim("c0")) == lease("g0.0")
    book.check()


def test_a_newer_life_gives_back_what_the_older_held():
    book = ledger("g0", size=1)
    book.claim(claim("c1"))
    book.compute(computed("c1", "g0.0"))
    book.claim(claim("c1", ("g0.0",)))
    assert book.claim(claim("c1", life=2)) == lease("g0.0")
    assert book.pool() == ["g0.1"]
    assert isinstance(book.claim(claim("c1", life=1)), Refused)
    assert isinstance(book.compute(computed("c1", "g0.0", life=1)), Refused)


def test_a_lost_cell_gives_back_its_lease_and_its_sum():
    book = ledger("g0")
    book.claim(claim("c1"))
    book.compute(computed("c1", "g0.0"))
    book.claim(claim("c1", ("g0.0",)))
    book.lose("c1")
    assert book.pool() == ["g0.0", "g0.1"]


def test_a_cell_that_was_believed_lost_keeps_what_nobody_else_got():
    book = ledger("g0")
    book.claim(claim("c1"))
    book.lose("c1")
    assert book.compute(computed("c1", "g0.0")) == Done()
    assert book.claim(claim("c1", ("g0.0",))) == lease("g0.1")


def test_a_cell_whose_lease_went_to_another_must_drop_its_sum():
    book = ledger("g0")
    book.claim(claim("c1"))
    book.compute(computed("c1", "g0.0"))
    book.claim(claim("c1", ("g0.0",)))
    book.lose("c1")
    book.claim(claim("c2"))
    assert isinstance(book.claim(claim("c1", ("g0.0", "g0.1"))), Refused)
    assert isinstance(book.compute(computed("c1", "g0.0")), Refused)
    assert book.leased == {"g0.0": Holder("c2", 1)} and not book.computed


def test_ids_that_a_rank_no_longer_has_return_to_the_pool():
    book = ledger("g0")
    book.claim(claim("c1"))
    book.compute(computed("c1", "g0.0"))
    assert book.claim(claim("c1", ())) == lease("g0.0")
    assert not book.computed


def test_ids_that_a_forgetful_ledger_has_not_are_believed_to_the_rank():
    book = ledger("g0")
    assert book.claim(claim("c1", ("g0.0",))) == lease("g0.1")
    assert book.computed == {"g0.0": Holder("c1", 1)}


def test_only_the_core_hears_that_the_batch_is_complete():
    book = ledger("g0", size=1)
    book.claim(claim("c1"))
    book.claim(claim("c0"))
    book.compute(computed("c1", "g0.0"))
    book.compute(computed("c0", "g0.1"))
    assert isinstance(book.claim(claim("c1", ("g0.0",))), NoMicroStep)
    assert book.claim(claim("c0", ("g0.1",), core=True)) == BatchComplete(
        batch=0,
        base_version="0.0",
        executions=2,
        contributions=(
            Contribution(cell="c0", life=1, ids=("g0.1",)),
            Contribution(cell="c1", life=1, ids=("g0.0",)),
        ),
        staleness={"mean": 0.0, "max": 0, "by": {"0": 2}},
    )


def test_a_lost_contribution_is_computed_again():
    book = ledger("g0", size=1)
    compute_all(book, "c1")
    assert book.lose_contribution(lost("c1")) == Done()
    assert book.claim(claim("c0", core=True)) == lease("g0.0")
    assert isinstance(book.claim(claim("c1", ("g0.0", "g0.1"))), Refused)


def test_a_step_must_have_exactly_the_ids_of_its_batch():
    book = ledger("g0", size=1)
    assert isinstance(book.apply(applied("g0.0", version="0.1")), Refused)
    assert isinstance(book.apply(applied("g0.0", "g0.1", "g0.1", version="0.1")), Refused)
    assert isinstance(book.apply(applied("g0.0", "g0.1", version="0.1", batch=1)), Refused)
    assert book.apply(applied("g0.1", "g0.0", version="0.1")) == Done()


def test_a_step_opens_the_next_batch_from_its_weights_and_is_noted_once():
    book = ledger("g0", "g1", size=1)
    ids = compute_all(book)
    assert book.apply(applied(*ids, version="0.1")) == Done()
    assert book.apply(applied(*ids, version="0.1")) == Done(note="again")
    assert isinstance(book.apply(applied(*ids, version="0.2")), Refused)
    assert book.claim(claim("c0", version="0.1", batch=1)) == lease("g1.0", batch=1, base="0.1")
    assert book.trained.tokens == 10 and book.trained.twice == 0
    assert book.compute(computed("c0", "g0.0")) == Done(note="applied")


def test_a_late_step_of_a_core_that_is_gone_is_refused():
    book = ledger("g0", size=1)
    book.restore(word(0, "1.0", source="rank:c0:2"))
    assert isinstance(book.apply(applied("g0.0", "g0.1", version="0.1")), Refused)
    assert book.apply(applied("g0.0", "g0.1", version="1.1")) == Done()


def test_a_step_holds_whatever_the_ledger_believed_of_the_sums():
    book = ledger("g0", size=1)
    compute_all(book, "c1")
    book.lose("c1")  # after the core pulled
    assert book.apply(applied("g0.0", "g0.1", version="0.1")) == Done()


def test_a_sum_from_the_weights_before_the_step_is_refused():
    book = ledger("g0", "g1", size=1)
    book.apply(applied("g0.0", "g0.1", version="0.1"))
    assert isinstance(book.compute(computed("c1", "g1.0", batch=1)), Refused)


def test_staleness_counts_executions_by_steps_since_dispatch():
    book = ledger(version="0.3")
    for name, dispatched, steps in (("g0", "0.3", 1), ("g1", "0.1", 3)):
        book.close(closed(name, dispatched=dispatched))
        book.pack(packed(name, steps))
    compute_all(book, version="0.3")
    complete = book.claim(claim("c0", tuple(book.open_ids), version="0.3", core=True))
    assert isinstance(complete, BatchComplete)
    assert complete.staleness == {"mean": 1.5, "max": 2, "by": {"0": 1, "2": 3}}


def two_steps_done() -> MicroStepLedger:
    book = ledger("g0", "g1", "g2", size=1)
    for batch in range(2):
        book.apply(applied(*compute_all(book, version=f"0.{batch}"), version=f"0.{batch + 1}", batch=batch))
    return book


def test_the_ledger_of_a_checkpoint_wins_over_memory():
    book = two_steps_done()
    answer, missing = book.restore(word(1, "1.1", ("g0.0", "g0.1"), source="rank:c0:2"))
    assert (answer, missing) == (Done(), [])
    assert book.claim(claim("c0", version="1.1", batch=1, life=2)) == lease("g1.0", batch=1, base="1.1")
    assert book.trained.tokens == 10
    book.check()


def test_a_late_repeat_of_a_ledger_rolls_nothing_back():
    book = two_steps_done()
    assert book.restore(word(0, "0.0")) == (Done(note="again"), [])
    assert book.open_batch == 2 and book.version == "0.2"


def test_a_ledger_that_knows_of_a_step_that_we_missed_is_believed():
    book = ledger("g0", "g1", size=1)
    book.restore(word(1, "1.1", ("g0.0", "g0.1"), source="rank:c0:2"))
    assert book.open_ids == ["g1.0", "g1.1"] and book.applied[0].weights_sum is None


def test_a_ledger_that_contradicts_the_journal_is_refused():
    book = two_steps_done()
    assert isinstance(book.restore(word(9, "1.9"))[0], Refused)
    assert isinstance(book.restore(word(2, "1.2", ("g2.0",)))[0], Refused)


def test_retired_groups_are_let_go_and_packed_again_only_for_an_older_checkpoint():
    book = two_steps_done()
    assert book.retire(1) == ["g0"] and book.retire(1) == []
    assert book.unload() == ["g2"]
    assert book.restore(word(0, "1.0", source="rank:c0:2"))[1] == ["g0", "g1", "g2"]
    assert isinstance(book.claim(claim("c0", version="1.0")), NoMicroStep)
    book.pack(packed("g0"))
    assert book.claim(claim("c0", version="1.0")) == lease("g0.0", base="1.0")


def test_a_group_that_packs_otherwise_the_second_time_is_an_error():
    book = ledger("g0")
    with pytest.raises(LedgerBroken):
        book.pack(packed("g0", steps=3))


def test_tokens_trained_twice_are_found_in_the_ranges():
    ranges = TrainedRanges()
    ranges.add([("e", "c", 0, 10), ("e", "c", 20, 30), ("e", "d", 0, 10)])
    assert (ranges.tokens, ranges.twice) == (30, 0)
    ranges.add([("e", "c", 5, 25), ("e", "c", 10, 20)])
    assert (ranges.tokens, ranges.twice) == (60, 20)


def test_a_lease_that_its_holder_never_learnt_of_is_free_when_it_says_so_and_its_sum_stands():
    book = ledger("g0", size=1)
    book.claim(claim("c1"))
    book.compute(computed("c1", "g0.0"))
    assert book.claim(claim("c1", ("g0.0",))) == lease("g0.1")  # the answer is lost, then the rank is told to stop
    assert isinstance(book.claim(claim("c0")), NoMicroStep)
    assert book.return_lease(LeaseReturned(cell="c1", life=1)) == Done()
    assert book.claim(claim("c0")) == lease("g0.1")
    assert book.computed == {"g0.0": Holder("c1", 1)}


def test_a_lease_is_not_returned_by_the_late_word_of_an_older_life():
    book = ledger("g0", size=1)
    book.claim(claim("c1", life=2))
    assert book.return_lease(LeaseReturned(cell="c1", life=1)) == Done()
    assert book.leased == {"g0.0": Holder("c1", 2)}
    assert book.knows(Holder("c1", 2)) and not book.knows(Holder("c1", 3))


def test_with_a_reserve_every_group_gets_one_place_and_a_restart_gives_the_same_ones():
    names = [f"g{i}" for i in range(8)]
    events: list[Any] = []
    for n, name in enumerate(names):
        told = dataclasses.replace(closed(name, n), seconds=float(n), closing=n + 1, to_come=7 - n)
        events += [told, packed(name, enough=name != "g5")]

    def places(order: str) -> list[str]:
        book = MicroStepLedger(2, order=order, reserve_groups=3)
        for event in events:
            book.close(event) if isinstance(event, GroupClosed) else book.pack(event)
        return [group.name for batch in range(4) for group in book.lots.lot(batch)]

    assert places("arrival") == [n for n in names if n != "g5"]
    for order in ("shuffle", "stratified"):
        assert sorted(places(order)) == [n for n in names if n != "g5"]
        assert places(order) != places("arrival")
        assert places(order) == places(order)


def test_a_closing_that_comes_late_does_not_lock_groups_into_the_reserve():
    book = MicroStepLedger(1, order="shuffle", reserve_groups=4)
    late, last = (dataclasses.replace(closed(name), closing=n, to_come=2 - n) for n, name in ((1, "late"), (2, "last")))
    for told in (last, late):
        book.close(told)
        book.pack(packed(told.group))
    assert len(book.lots.reserve) == 0


def test_order_of_arrival_shows_as_correlation_of_duration_and_place():
    book = MicroStepLedger(2)
    book.restore(word(0, "0.0"))
    for n in range(6):
        book.close(dataclasses.replace(closed(f"g{n}", n), seconds=float(n)))
        book.pack(packed(f"g{n}"))
    assert book.lots.bias(3)["duration_by_place"] == pytest.approx(0.956, abs=0.001)
    assert book.lots.bias(0)["duration_by_place"] is None
