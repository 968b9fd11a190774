"""Models of a made-up host whose heads return logits that are not computed: found at their first forward, put back."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import logitless
from logitless import LogitlessError, Logits
from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Replacement
from logitless.adapters.patching import install_host, installed, try_host, uninstall_host

RUN = "(model, ids)"


class Model(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(11, 4), head or nn.Linear(4, 11)

    def forward(self, ids):
        return self.lm_head(self.embedding(ids))


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.fixture
def maths(fakehost):
    maths = sys.modules["fakehost.maths"]
    exec("def run(model, ids): return model(ids)", vars(maths))
    return maths


def host(signature: str = RUN, **more) -> Host:
    score = Replacement("fakehost.maths", "mean", "(x, *, scale=2.0)", lambda original, _: original)
    head = Replacement("fakehost.maths", "run", signature, deferring(lambda model, ids: model))
    settings = {"name": "fake", "package": "fakehost", "versions": ("2.5",), "logits": "deferred"} | more
    return Host(replacements=lambda _: [score], heads=lambda _: [head], **settings)


IDS = torch.arange(6).view(2, 3)


def test_a_model_is_deferred_once_and_put_back(maths):
    model, own = Model(), maths.run
    plain = model(IDS)
    install_host(host(), {})
    first, second = maths.run(model, IDS), maths.run(model, IDS)
    assert type(first) is type(second) is Logits
    torch.testing.assert_close(first.computed(), plain)
    report = installed()[0]
    assert report.logits == ("logits: not computed (deferred); 1 models so far",)
    assert [x.name for x in report.replaced] == ["fakehost.maths.mean"]
    assert report.made == {}
    uninstall_host("fake")
    assert maths.run is own
    assert type(model(IDS)) is torch.Tensor


def test_a_model_that_nobody_holds_is_freed(maths):
    model = Model()
    install_host(host(), {})
    assert type(maths.run(model, IDS)) is Logits
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert installed()[0].logits == ("logits: not computed (deferred); 1 models so far",)
    uninstall_host("fake")


def test_a_call_that_reads_whole_logits_gets_them_from_the_head(maths):
    model = Model()
    plain = model(IDS)
    few = Replacement("fakehost.maths", "run", RUN, deferring(lambda model, ids: model, lambda model, ids: ids is IDS))
    install_host(replace(host(), heads=lambda _: [few]), {})
    assert type(maths.run(model, IDS)) is Logits
    whole = maths.run(model, IDS.clone())
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)
    assert installed()[0].logits == ("logits: not computed (deferred); 0 models so far",)
    assert type(maths.run(model, IDS)) is Logits
    uninstall_host("fake")
    assert type(model(IDS)) is torch.Tensor


def test_the_host_may_keep_its_logits(maths):
    install_host(host(), {"logits": "host"})
    assert type(maths.run(Model(), IDS)) is torch.Tensor
    assert "  logits: computed by the host's own head" in str(logitless.status())


def test_who_computes_logits_is_named(maths):
    install_host(host(), {})
    with pytest.warns(UserWarning, match="logits were computed"):
        torch.softmax(maths.run(Model(), IDS).sigmoid(), -1)
    (place,) = installed()[0].made
    assert place.rsplit(":", 1)[0].endswith("test_host_heads.py")
    assert f"  logits made 1 times, by {place}" in str(logitless.status())


def test_a_head_that_cannot_be_deferred_computes_and_is_named(maths):
    model = Model(Odd(4, 11))
    install_host(host(), {})
    assert type(maths.run(model, IDS)) is type(maths.run(model, IDS)) is torch.Tensor
    assert any("must be a torch.nn.Linear but is Odd" in line for line in installed()[0].logits)
    uninstall_host("fake")


@pytest.mark.parametrize("rounded", [True, False])
def test_which_number(maths, rounded):
    model = Model().bfloat16()
    install_host(host(), {"logits": "deferred" if rounded else "float32"})
    assert maths.run(model, IDS).linear.match == ("bfloat16" if rounded else None)


def test_a_host_that_looks_different_computes_as_before_and_says_so(maths):
    report = install_host(host("(model, other)"), {})
    assert type(maths.run(Model(), IDS)) is torch.Tensor
    assert len(report.notes) == 1
    assert report.notes[0].startswith('logits are computed as before: install("fake"): fakehost.maths.run')
    assert report.logits == ("logits: computed by the host's own head",)


def test_heads_that_nobody_has_seen_run_are_deferred_where_one_asks(maths):
    unseen = Replacement("fakehost.maths", "run", RUN, deferring(lambda model, ids: model), if_asked=True)
    install_host(replace(host(), heads=lambda _: [unseen]), {})
    assert type(maths.run(Model(), IDS)) is torch.Tensor
    uninstall_host("fake")
    install_host(replace(host(), heads=lambda _: [unseen]), {"logits": "deferred"})
    assert type(maths.run(Model(), IDS)) is Logits


def test_a_forward_that_refuses_computes_and_is_named(maths):
    """Tensor parallelism is seen only in the forward, where FSDP has gathered what it sharded."""
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    try:
        model = Model(nn.Linear(4, 11, bias=False))
        plain = model(IDS)
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
        model.lm_head.register_forward_pre_hook(lambda _, x: DTensor.from_local(x[0], mesh))
        install_host(host(), {})
        torch.testing.assert_close(maths.run(model, IDS).full_tensor(), plain)
        assert any("tensor parallelism has sharded it" in line for line in installed()[0].logits)
        uninstall_host("fake")
        install_host(replace(host(), placed=True), {})
        found = maths.run(model, IDS)
        assert isinstance(found, DTensor)
        assert type(found.full_tensor()) is Logits
        uninstall_host("fake")
    finally:
        dist.destroy_process_group()


def test_values_of_the_option(maths):
    with pytest.raises(LogitlessError, match=r"logits must be one of deferred, float32, host but is 'off'"):
        install_host(host(), {"logits": "off"})
    with pytest.raises(LogitlessError, match="no option 'logits'"):
        install_host(Host("fake", "fakehost", ("2.5",), host().replacements), {"logits": "host"})
    assert try_host(host()).logits == ("logits: not computed (deferred); 0 models so far",)
