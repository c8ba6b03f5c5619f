"""Who may talk: one CURVE pair for servers, one for clients, and a secret from which each execution's bearer token
follows.

All live in `keys/` of the run directory (0600). Whoever can read them is the user.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass

import zmq

from gyre_base.rundir import RunDir


@dataclass(frozen=True)
class Keys:
    """CURVE keys as z85 bytes; `bearer` signs execution tokens; `admin` guards the engines' control endpoints."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    bearer: bytes
    admin: str

    def token(self, execution: str) -> str:
        """The API key of one execution: nothing to store, nothing to guess."""
        return hashlib.blake2b(execution.encode(), key=self.bearer, digest_size=20).hexdigest()

    def accepts(self, execution: str, token: str) -> bool:
        return hmac.compare_digest(self.token(execution), token)


def make_keys(run: RunDir) -> Keys:
    """Create the keys once; a second start of the run finds the same ones."""
    path = run.path("keys", "keys.json")
    if not path.exists():
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        body = {
            "server_public": server_public.decode(),
            "server_secret": server_secret.decode(),
            "client_public": client_public.decode(),
            "client_secret": client_secret.decode(),
            "bearer": secrets.token_hex(32),
            "admin": secrets.token_hex(16),
        }
        run.write_atomic("keys/keys.json", json.dumps(body))
        run.write_atomic("keys/admin", body["admin"])  # alone, for engines that read a key file
    return load_keys(run)


def load_keys(run: RunDir) -> Keys:
    path = run.path("keys", "keys.json")
    if os.stat(path).st_mode & 0o077:
        raise PermissionError(f"{path} can be read by others; chmod 600 it")
    body = json.loads(path.read_text())
    return Keys(
        server_public=body["server_public"].encode(),
        server_secret=body["server_secret"].encode(),
        client_public=body["client_public"].encode(),
        client_secret=body["client_secret"].encode(),
        bearer=body["bearer"].encode(),
        admin=body["admin"],
    )
