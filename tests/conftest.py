"""Options shared by all tests."""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import settings

settings.register_profile("gyre", deadline=None)  # machines are noisy: a slow example is no failure
settings.load_profile("gyre")

STATE = "XDG_STATE_HOME"  # where gyre keeps its list of runs


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="write what is, instead of comparing")


def pytest_configure(config):
    """Runs of tests do not enter the list of the user who tests."""
    config._own_state = tempfile.mkdtemp(prefix="gyre-state-")
    os.environ[STATE] = config._own_state


def pytest_unconfigure(config):
    shutil.rmtree(config._own_state, ignore_errors=True)
