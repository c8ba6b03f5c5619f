"""Options shared by all tests."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="write what is, instead of comparing")
