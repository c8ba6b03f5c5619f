"""Which experts a mixture of experts sent each token to: what an engine reports and a rank replays (R3).

Owns the shape, its compact form, and the check of what an engine says. Pure, but for `shape_of`.

Row t of a call is the routing of the token *before* its sampled token t, the one whose state that token was sampled
from; so prompts are in nobody's record. A row that no engine reported is unknown: the trainer routes it anew, and it is
counted.

Shapes: N tokens, L layers of the model (all of them, those without experts too), K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gyre_base.config import Config, ConfigError

Routing: TypeAlias = NDArray[np.unsignedinteger[Any]]  # [N, L, K], uint8 or uint16
NAME = "routed_experts"  # of the array in a call's record, [sampled tokens, L, K]


class BadRouting(ValueError):
    """Rows that can't be the routing of these tokens."""


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What of a model decides its rows. `sparse`: which layers have experts."""

    sparse: tuple[bool, ...]
    chosen: int
    experts: int

    @property
    def layers(self) -> int:
        return len(self.sparse)

    @property
    def form(self) -> np.dtype[Any]:
        """The smallest that holds every expert and, as its highest number, what stands for an unknown one."""
        return np.dtype("<u1" if self.experts < 256 else "<u2")

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> RoutingShape:
        """`model` is its config.json. Raises ConfigError for one without experts."""
        layers = int(model["num_hidden_layers"])
        experts = int(model.get("num_experts") or model.get("num_local_experts") or 0)
        step, dense = int(model.get("decoder_sparse_step") or 1), model.get("mlp_only_layers") or ()
        sparse = tuple(bool(experts) and n not in dense and (n + 1) % step == 0 for n in range(layers))
        if not any(sparse):
            kind = model.get("model_type")
            raise ConfigError(f"engine.routed_experts: the model ({kind}) has no experts to record; set it to false")
        return cls(sparse=sparse, chosen=int(model["num_experts_per_tok"]), experts=experts)

    def unknown(self, tokens: int) -> Routing:
        out: Routing = np.full((tokens, self.layers, self.chosen), np.iinfo(self.form).max, self.form)
        return out

    def reported(self, text: str, tokens: int) -> Routing:
        """Base64 int32 rows of so many tokens. Raises BadRouting: another size, no such expert, an expert twice."""
        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except (binascii.Error, ValueError) as error:
            raise BadRouting(f"rows that are no numbers: {error}") from None
        if numbers.size != tokens * self.layers * self.chosen:
            raise BadRouting(f"{numbers.size} numbers for {tokens} tokens, {self.layers} layers, {self.chosen} experts")
        sparse = np.array(self.sparse)
        rows = numbers.reshape(tokens, self.layers, self.chosen)[:, sparse]
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.experts):
            raise BadRouting("an expert that the model does not have")
        if (np.diff(np.sort(rows, axis=2), axis=2) == 0).any():
            raise BadRouting("an expert twice for one token")
        out: Routing = np.zeros((tokens, self.layers, self.chosen), self.form)
        out[:, sparse] = rows
        return out

    def spliced(self, tokens: int, parts: Iterable[tuple[int, int, str]]) -> tuple[Routing, list[str]]:
        """(rows of a call, what is wrong with some) from what each submission reported: (its first token, how many it
        sampled, its rows or "")."""
        out, wrong = self.unknown(tokens), []
        for start, count, text in parts:
            if text:
                try:
                    rows = self.reported(text, count)[: max(0, tokens - start)]
                    out[start : start + len(rows)] = rows
                except BadRouting as error:
                    wrong.append(str(error))
        return out, wrong


def shape_of(config: Config) -> RoutingShape | None:
    """What `engine.routed_experts` asks of the model; None when it is off. Raises ConfigError."""
    if not config.engine.routed_experts:
        return None
    try:
        return RoutingShape.of(json.loads((Path(config.model.path) / "config.json").read_text()))
    except OSError as error:
        raise ConfigError(f"engine.routed_experts needs the model's config.json: {error}") from None


def rows_of(arrays: Mapping[str, NDArray[Any]], tokens: int) -> Routing | None:
    """The rows among a call's arrays; None if there are none for so many sampled tokens."""
    rows = arrays.get(NAME)
    fits = rows is not None and rows.ndim == 3 and len(rows) == tokens and rows.dtype in (np.uint8, np.uint16)
    return rows if fits else None


def known(rows: Routing) -> NDArray[np.bool_]:
    """bool[N]: which rows an engine reported."""
    out: NDArray[np.bool_] = rows[:, 0, 0] != np.iinfo(rows.dtype).max
    return out
