"""An emulated run: every time of the configuration is scaled like the profile, or someone has said why not."""

from __future__ import annotations

import dataclasses

import pytest

from cellctl.simulate.profile import Arm, Durations, Laws, Profile
from gyre_base import config as configuration
from gyre_base.config import Config
from gyre_cli import emulate

HOUR_S = 36.0  # that an hour of the profile takes
SCALE = HOUR_S / 3600.0
ARM = Arm(name="elastic", policy="elastic", nodes=(1, 1), steps_per_burst=2, stagger_h=0.5)
SMALL = Profile(
    name="small",
    steps=2,
    groups_per_batch=2,
    group_size=2,
    tasks=16,
    durations=Durations(limit_h=5.0),
    laws=Laws(train_node_h=4.0, slots_per_node=4.0, replica_nodes=1),
    arms=(ARM,),
)


@pytest.fixture
def lived(tmp_path) -> Config:
    return emulate.prepare(SMALL, ARM, 1, tmp_path / "run", HOUR_S)[1]


def test_every_time_in_the_configuration_has_a_rule_and_every_rule_a_time():
    times = [key for key in configuration.keys() if key.endswith("_s")]
    assert sorted(emulate.TIMES) == sorted(times), "decide in emulate.TIMES how an emulated run scales it"


def test_limits_and_the_stagger_shrink_with_the_profile(lived):
    assert lived.emulate.time_scale == pytest.approx(SCALE)
    assert lived.tasks.harness_limit_s == pytest.approx(5.0 * HOUR_S)
    assert lived.tasks.open_call_s == pytest.approx(60.0 * SCALE)
    assert lived.scheduler.stagger_s == pytest.approx(0.5 * HOUR_S)


def test_signs_of_life_shrink_as_far_as_a_machine_can_follow(lived):
    plain = Config()
    assert plain.cluster.heartbeat_s * SCALE < lived.cluster.heartbeat_s < plain.cluster.heartbeat_s
    assert lived.cluster.peer_timeout_s < plain.cluster.peer_timeout_s
    assert lived.cluster.peer_timeout_s > 10 * lived.cluster.heartbeat_s


def test_a_long_micro_step_is_no_stall(lived):
    """A micro-step takes an hour of the profile, six times `cluster.stall_s` in its plain form."""
    assert Config().cluster.stall_s < lived.emulate.execution_node_s == pytest.approx(3600.0)
    assert lived.cluster.stall_s == pytest.approx(emulate.MICRO_STEPS * HOUR_S)


def test_what_takes_real_time_keeps_it_and_what_is_off_stays_off(lived):
    plain = Config()
    for dotted, rule in emulate.TIMES.items():
        section, _, name = dotted.partition(".")
        if rule == emulate.REAL:
            assert getattr(getattr(lived, section), name) == getattr(getattr(plain, section), name), dotted
    assert lived.tasks.progress_every_s == 0.0
    assert lived.emulate.to_train_s == SMALL.laws.to_train_s  # engines and trainers scale these themselves


def test_a_time_that_nobody_has_decided_on_is_an_error(lived, monkeypatch):
    monkeypatch.setattr(emulate, "TIMES", {k: v for k, v in emulate.TIMES.items() if k != "tasks.grace_s"})
    with pytest.raises(KeyError, match=r"tasks\.grace_s"):
        emulate.scaled(dataclasses.replace(lived))
