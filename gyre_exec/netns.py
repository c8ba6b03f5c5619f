"""Starts a program behind walls that the executor can't set from outside. Run as `python -I -S netns.py`; stdlib only.

    netns.py [--network none | --network PORT (--give FD | --relay SOCKET)] [--file-bytes N] [--processes N]
             -- PROGRAM ARGUMENT...

With --network it makes a network namespace in which nothing exists but a loopback. With a PORT it listens there, and
either hands the listening socket to the executor over FD (a socket belongs to the namespace it was made in, whoever
accepts from it: no process of ours has to stay inside, and the image needs no Python), or, where the executor is no
ancestor, forwards every connection to the Unix socket SOCKET from a child of its own. Then it becomes PROGRAM. Without
root a user namespace comes first; there a limit on processes counts the sandbox alone.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
PR_SET_PDEATHSIG = 1
BACKLOG = 64
CHUNK_BYTES = 65_536
FAILED = 125
LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    if LIBC.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no namespace of its own can be made: {os.strerror(number)}")


def become_user_of_own() -> None:
    """A user namespace with the one user we are: in it we may make others."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        flags = struct.unpack("16sh", fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def leave_network() -> None:
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:  # root of a container without the right to make one
        become_user_of_own()
        unshare(CLONE_NEWNET)
    loopback_up()


def serve(port: int, options: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as server:
        server.set_inheritable(False)
        if "--give" in options:
            with socket.socket(fileno=int(options["--give"])) as line:
                socket.send_fds(line, [b"s"], [server.fileno()])
        else:
            forward(server, options["--relay"])


def forward(server: socket.socket, relay: str) -> None:
    """From a child that dies with the program: every connection here is one to `relay`."""
    parent = os.getpid()
    if os.fork() != 0:
        return
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a warning to the harness is none to its line
    while True:
        here, _ = server.accept()
        there = socket.socket(socket.AF_UNIX)
        try:
            there.connect(relay)
        except OSError:  # the executor is gone: the harness sees a connection that ends
            here.close()
            continue
        for source, target in ((here, there), (there, here)):
            threading.Thread(target=pump, args=(source, target), daemon=True).start()


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    options = dict(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    program = arguments[split + 1 :]
    if os.getuid() != 0:
        become_user_of_own()
    if "--network" in options:
        leave_network()
        if options["--network"] != "none":
            serve(int(options["--network"]), options)
    limit(resource.RLIMIT_CORE, 0)
    if "--file-bytes" in options:
        limit(resource.RLIMIT_FSIZE, int(options["--file-bytes"]))
    if "--processes" in options and os.getuid() != 0:
        limit(resource.RLIMIT_NPROC, int(options["--processes"]))
    os.execvp(program[0], program)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        print(f"gyre: the sandbox can't be made: {error}", file=sys.stderr)
        sys.exit(FAILED)
