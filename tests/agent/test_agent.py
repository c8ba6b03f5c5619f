"""The agent's decisions, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celld.agent import core as c
from gyre_base import messages as m
from gyre_base.daemon import Send
from gyre_base.vocabulary import Role


def agent_up(version: str = "0.0") -> c.Agent:
    agent = c.Agent(cell="c1")
    agent.handle(c.Start(), 0.0)
    agent.handle(c.ChildUp(child="rank", version=version), 0.0)
    agent.handle(c.ChildUp(child="engine", version=version, url="http://e"), 0.0)
    return agent


def reports(commands: list) -> list[m.RoleChanged]:
    return [x.message for x in commands if isinstance(x, Send) and isinstance(x.message, m.RoleChanged)]


def test_a_cell_reports_only_when_both_children_are_up():
    agent = c.Agent(cell="c1")
    assert agent.handle(c.Start(), 0.0) == [c.Launch(child="rank"), c.Launch(child="engine")]
    assert agent.handle(c.ChildUp(child="rank", version="0.0"), 0.0) == []
    (report,) = reports(agent.handle(c.ChildUp(child="engine", version="0.0", url="http://e"), 0.0))
    assert (report.role, report.version, report.engine_url) == (Role.ROLLOUT, "0.0", "http://e")


def test_a_repeated_order_is_answered_and_not_done_twice():
    agent = agent_up()
    order = m.FlipCell(cell="c1", to=Role.TRAIN, epoch=1)
    assert agent.handle(order, 0.0) == [c.Switch(to=Role.TRAIN, epoch=1, version="")]
    assert agent.handle(order, 0.0) == []  # under way
    done = c.Switched(to=Role.TRAIN, epoch=1, version="0.0", phases_s={})
    (report,) = reports(agent.handle(done, 0.0))
    assert report.role is Role.TRAIN
    assert reports(agent.handle(order, 0.0)) == [report]


def test_a_refused_order_leaves_the_cell_serving_and_is_told_with_its_reason():
    agent = agent_up()
    order = m.FlipCell(cell="c1", to=Role.TRAIN, epoch=1)
    agent.handle(order, 0.0)
    refused, report = agent.handle(c.SwitchRefused(epoch=1, why="needs 9 GiB"), 0.0)
    assert refused.message == m.SwitchRefused(cell="c1", epoch=1, why="needs 9 GiB")
    assert (report.message.role, report.message.epoch) == (Role.ROLLOUT, 1)
    assert reports(agent.handle(order, 0.0)) == [report.message]  # the order again, its answer again
    assert agent.handle(c.SwitchRefused(epoch=0, why="late"), 0.0) == []
    assert agent.handle(m.FlipCell(cell="c1", to=Role.TRAIN, epoch=2), 0.0)  # a new order is tried


def test_an_older_epoch_is_ignored():
    agent = agent_up()
    agent.handle(m.FlipCell(cell="c1", to=Role.TRAIN, epoch=5), 0.0)
    assert agent.handle(m.FlipCell(cell="c1", to=Role.ROLLOUT, epoch=4, version="0.0"), 0.0) == []
    assert agent.handle(c.Switched(to=Role.ROLLOUT, epoch=4, version="0.0", phases_s={}), 0.0) == []


@pytest.mark.parametrize("child", ["engine", "rank"])
def test_a_dead_child_takes_the_cell_out_and_brings_it_back(child):
    agent = agent_up()
    commands = agent.handle(c.ChildDied(child=child, detail="killed"), 0.0)
    assert isinstance(commands[0].message, m.CellFault)
    assert c.Launch(child=child) in commands
    assert agent.role is Role.STARTING
    for command in commands:
        if isinstance(command, c.Launch):
            out = agent.handle(c.ChildUp(child=command.child, version="1.0", url="http://f"), 0.0)
    assert reports(out)[0].role is Role.ROLLOUT


@given(st.lists(st.sampled_from(["flip", "back", "done", "fail", "die", "up", "repeat"]), max_size=40))
def test_whatever_happens_epochs_only_grow_and_the_role_follows_the_orders(steps):
    agent, epoch, last, order = agent_up(), 0, 0, None
    for step in steps:
        event = None
        if step in ("flip", "back"):
            epoch += 1
            order = m.FlipCell(cell="c1", to=Role.TRAIN if step == "flip" else Role.ROLLOUT, epoch=epoch, version="0.1")
            event = order
        elif step == "repeat" and order is not None:
            event = order
        elif step == "done" and order is not None:
            event = c.Switched(to=order.to, epoch=order.epoch, version="0.1", phases_s={})
            if agent.role is Role.STARTING:
                continue
        elif step == "fail":
            event = c.SwitchFailed(epoch=epoch, child="engine", detail="x")
        elif step == "die":
            event = c.ChildDied(child="rank", detail="x")
        elif step == "up":
            agent.handle(c.ChildUp(child="engine", version="0.1", url="http://e"), 0.0)
            event = c.ChildUp(child="rank", version="0.1")
        if event is not None:
            agent.handle(event, 0.0)
        assert agent.epoch >= last
        last = agent.epoch
