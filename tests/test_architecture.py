"""The fence: imports point down, heavy libraries stay in their rooms, cores stay pure."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("gyre_base", "cellctl", "proxyd", "trajtools", "celld", "gyre_exec", "gyre_cli")
MAY_IMPORT = {
    "gyre_base": set(),
    **{room: {"gyre_base"} for room in ("cellctl", "proxyd", "trajtools", "celld", "gyre_exec")},
    "gyre_cli": set(ROOMS),
}
ONLY_IN = {
    "torch": {"celld"},
    "megatron": {"celld"},
    "mooncake": {"celld"},
    "zmq": {"gyre_base"},
    "click": {"gyre_cli"},
    "rich": {"gyre_cli"},
    "matplotlib": {"gyre_cli"},
    "submitit": {"gyre_exec"},
}
CORE_MAY_NOT_IMPORT = {"asyncio", "time", "random", "os", "zmq", "torch", "logging", "socket", "subprocess", "aiohttp"}
CORES = [
    "cellctl/core.py", "cellctl/ledger.py", "cellctl/policies.py", "cellctl/roles.py", "cellctl/operator.py",
    "celld/agent/core.py", "proxyd/core.py", "proxyd/capture.py", "trajtools/trajd/core.py",
    "trajtools/trajd/ledger.py", "gyre_exec/core.py", "gyre_exec/pool.py", "gyre_exec/agreement.py",
]  # fmt: skip


def imports(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it; type-checking imports count too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_rooms_import_only_what_lies_below_them():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room in ROOMS
        for path in files(room)
        for name in imports(path) & set(ROOMS) - {room} - MAY_IMPORT[room]
    ]
    assert not wrong


def test_heavy_libraries_stay_in_their_rooms():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room in ROOMS
        for path in files(room)
        for name in imports(path) & set(ONLY_IN)
        if room not in ONLY_IN[name]
    ]
    assert not wrong


def test_cores_know_no_clock_no_chance_and_no_socket():
    wrong = [f"{core} imports {name}" for core in CORES for name in imports(ROOT / core) & CORE_MAY_NOT_IMPORT]
    assert not wrong


def test_the_example_harness_knows_nothing_of_gyre():
    for name in ("harness.py", "evaluate.py"):
        assert not imports(ROOT / "examples" / "quickstart" / name) & set(ROOMS)


def test_nothing_unpickles():
    wrong = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files(room)
        if imports(path) & {"pickle", "dill", "marshal", "shelve"}
    ]
    assert not wrong
