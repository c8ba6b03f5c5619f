"""One megatron process group per test process; a small random policy beside its plain-torch twin."""

from __future__ import annotations

import pytest
import torch

from celld.tiny.model import TinyConfig, TinyQwen3

torch.set_num_threads(1)

SMALL = TinyConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.2,
)


def pytest_configure(config):
    for kind in ("DeprecationWarning", "UserWarning", "FutureWarning"):  # megatron's, at import and at every call
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:(megatron|torch).*")


def unlike_norms(model: TinyQwen3) -> TinyQwen3:
    """Norms that are not all one: a swapped norm would else go unseen."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


@pytest.fixture(scope="session")
def reference() -> TinyQwen3:
    return unlike_norms(TinyQwen3(SMALL).initialise(3))


@pytest.fixture(scope="session")
def policy(reference):
    from celld.trainer import cpu
    from celld.trainer.model import Policy

    cpu.start_parallel()
    policy = Policy(SMALL.to_hf())
    policy.load(dict(reference.state_dict()))
    return policy


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "plain"])
def mixture(request, policy):
    """(a small mixture of experts in megatron, its plain-torch twin). `policy`: the process group is up."""
    from celld.trainer.model import Policy
    from tests.trainer import experts

    twin = experts.twin(normalised=request.param)
    mine = Policy(experts.config_of(normalised=request.param))
    mine.load(dict(twin.state_dict()))
    return mine, twin
