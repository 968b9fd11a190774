"""Rules that other tests reach on ranks, on a card or in a compiler alone, one by one and in this process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

import logitless as ll
from logitless import collectives
from logitless.backends import blocks, tiled
from logitless.backends.contract import Problem
from logitless.call import Asked, checks, resolve
from logitless.call.call import _facts
from logitless.call.resolve import apart_everywhere, as_products_take
from logitless.errors.arguments import is_number
from logitless.machine import Tiles
from logitless.memory import sized
from logitless.objectives import inputs
from logitless.operands import Linear
from logitless.operands.logits import like
from logitless.operands.sampling import Sampling
from logitless.passes.exponentials import Exponentials
from logitless.passes.own_terms import differs
from logitless.product_table import product_sizes
from logitless.readings.reading import LARGEST
from logitless.readings.table import Table
from logitless.route import loss as loss_routes
from logitless.softmax import ELSEWHERE, SKIP, Coefficients, Normaliser, target_column
from logitless.sources import linear, teachers
from logitless.sources.listed import id_logits
from logitless.spec import inspectable
from logitless.tools.outputs import text_table
from logitless.tools.score.texts import Texts


def test_an_error_of_a_comparison_says_what_was_waited_for(monkeypatch):
    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gone)
    with pytest.raises(RuntimeError) as caught:
        collectives.table_over(SimpleNamespace(size=lambda: 2), (1, "a"))  # pyright: ignore[reportArgumentType]
    assert caught.value.__notes__[0].startswith("logitless: all_gather of a few plain values over 2 ranks stopped here")


def dtensor(*placements: Any, rows: int = 3) -> Any:
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    mesh = SimpleNamespace(ndim=1, get_group=lambda: group)
    return SimpleNamespace(
        placements=placements, device_mesh=mesh, to_local=lambda: torch.zeros(rows, 2), dim=lambda: 1
    )


def test_the_shard_of_a_dtensor(monkeypatch):
    made = []
    monkeypatch.setattr("logitless.spec.table_over", lambda group, row: [(4,), row, (2,)])
    monkeypatch.setattr(ll.VocabShard, "__init__", lambda self, *bounds: made.append(bounds))
    ll.VocabShard.of(dtensor(Shard(0)))
    assert [bounds[:2] for bounds in made] == [(4, 7)]
    for other in (Shard(1), Replicate()):
        with pytest.raises(ll.LogitlessError, match=r"VocabShard.of: weight must be sharded by rows"):
            ll.VocabShard.of(dtensor(other))


def test_a_bias_that_fsdp_has_split_is_named():
    hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    stands = SimpleNamespace(
        hidden=hidden,
        weight=weight,
        linear=SimpleNamespace(shard=None, bias=dtensor(Shard(0)), sequence_parallel=False),
    )
    with pytest.raises(ll.LogitlessError, match=r"^logprobs: bias is a DTensor with placements"):
        as_products_take("logprobs", stands)


@pytest.mark.parametrize(("kind", "summed"), [("reduced", 1), ("partial", 0)])
def test_hidden_gradients_are_summed_over_the_group_where_asked_for(kind: str, summed: int, monkeypatch):
    seen = []
    monkeypatch.setattr(linear, "sum_over", lambda group, x: seen.append(group) or x)
    call = SimpleNamespace(linear=SimpleNamespace(hidden_grad=kind, sequence_parallel=False), group="a group")
    linear.reduced_gradient(torch.zeros(2, 3), torch.Size((2, 3)), call)  # pyright: ignore[reportArgumentType]
    assert len(seen) == summed


def test_sums_by_sample_go_over_the_group(monkeypatch):
    seen = []
    monkeypatch.setattr(inputs, "sum_over", lambda group, x: seen.append((group, x.tolist())) or x)
    x, counted = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, False])
    inputs._segment_sums(x, counted, torch.tensor([1, 2]), "a group")  # pyright: ignore[reportArgumentType]
    assert seen == [("a group", [1.0, 2.0])]


def test_a_teachers_logits_are_read_where_they_lie(monkeypatch):
    """No copy of them is made in the student's order of columns, which is theirs."""
    monkeypatch.setattr(teachers.TeacherRows, "of", None)
    logits, teacher = torch.randn(2, 4, 9, dtype=torch.float64)
    out = ll.logprobs(logits, torch.tensor([1, 2, 3, -100]), teacher=teacher, divergence="forward_kl")
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(out.divergence[:3], (log_q.exp() * (log_q - log_p)).sum(-1)[:3])


@pytest.mark.parametrize("bias", [False, True])
def test_the_route_of_a_loss_knows_of_a_bias(bias: bool, monkeypatch):
    seen, of = [], loss_routes.LossShape.of
    monkeypatch.setattr(loss_routes.LossShape, "of", lambda *a, **known: seen.append(known["bias"]) or of(*a, **known))
    hidden, weight = torch.zeros(3, 2, requires_grad=True), torch.zeros(5, 2)
    logits = ll.Logits(hidden, weight, bias=torch.zeros(5) if bias else None)
    fields = {"old_logprob": "current", "advantage": torch.ones(3)}
    ll.policy_loss(logits, torch.tensor([1, 2, 3]), ll.Objective(), **fields)
    assert seen == [bias]


@pytest.mark.parametrize(("kind", "sums"), [("forward_kl", True), ("jsd", False)])
def test_the_route_of_a_loss_knows_what_products_of_two_models_make(kind: str, sums: bool, monkeypatch):
    """dZ of any divergence, and the sums of one that needs no normaliser first."""
    seen, choose = [], loss_routes.choose_loss_plan
    noting = lambda shape, *a, **k: seen.append(shape.coupled) or choose(shape, *a, **k)  # noqa: E731
    monkeypatch.setattr(loss_routes, "choose_loss_plan", noting)
    hidden, weight, other, head = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (512, 4096) * 2)
    objective = ll.Objective(policy="none", divergence=kind, divergence_coef=1.0)
    given = {"teacher": ll.Teacher(ll.Logits(other, head)), "device": "cuda"}
    rows = torch.zeros(512, dtype=torch.int64, device="meta")
    ll.explain(ll.policy_loss, ll.Logits(hidden, weight), rows, objective, **given)
    assert seen == [(sums, True)]


def test_which_readings_a_product_tells_by_itself():
    """The most likely id, and nothing else; then sizes decide."""

    def why(stats: tuple[str, ...], squash: float = 0.0) -> str | None:
        table = Table.of(stats, 0, None, negative=False, start=0)
        products = SimpleNamespace(takes_sizes=lambda dtype, depth: None)
        call: Any = SimpleNamespace(
            backend=SimpleNamespace(products=products),
            backend_name="triton",
            machine=SimpleNamespace(epilogues=True),
            kept=None,
            rank=0,
            table=table,
            squash=squash,
            dtype=torch.bfloat16,
            depth=64,
        )
        return apart_everywhere(call)

    assert why(("top1",)) is None
    assert why(("top1", "max_logit")) is None
    for stats, squash in ((("collision",), 0.0), (("top1", "rank"), 0.0), (("top1",), 0.5)):
        assert "such products tell top1" in (why(stats, squash) or "")


def test_what_ranks_compare_of_a_head():
    """Of a bias and a buffer, of which every rank has its own part, whether there is one; of all else, what it is."""
    found = _facts(Linear(bias=torch.zeros(3), match="bfloat16"))
    assert (found["whether there is a bias"], found["whether there is a weight_grad"]) == (True, False)
    assert found["match"] == "bfloat16"
    assert "bias" not in found


def test_rows_left_out_without_numbers():
    """A compiler's tensors have none to look for."""
    for mode in (FakeTensorMode(), torch.no_grad()):
        with mode:
            dz, skipped = torch.ones(3, 2), torch.zeros(3, dtype=torch.bool)
            tiled._zero_skipped(dz, skipped)
    dz, skipped = torch.ones(3, 2), torch.tensor([False, True, False])
    tiled._zero_skipped(dz, skipped)
    assert dz.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("width", [1024, 2048, 4096])
def test_canonical_products_store_a_part_for_every_block(width: int):
    sizes = product_sizes(1000, width, canonical=True)
    assert (sizes.tiles, sizes.columns, sizes.groups(1000)) == (0, 128, 8)


def test_a_generation_prompt_behind_the_last_answer_is_not_scored():
    """Of a template that ends no message, nothing else tells where the answer stops."""

    class Tokenizer:
        eos_token_id = 9

        def apply_chat_template(self, messages: list, add_generation_prompt: bool, **_: Any) -> dict[str, list[int]]:
            ids = [x for m in messages for x in ([1] if m["role"] == "user" else [2]) + [len(m["content"])]]
            return {"input_ids": ids + ([2] if add_generation_prompt else [])}

    texts = Texts.__new__(Texts)
    object.__setattr__(texts, "turns", "all")
    texts.__dict__["_tokenizer"] = Tokenizer()
    words = [{"role": role, "content": text} for role, text in (("user", "abc"), ("assistant", "defgh"))]
    found = texts.conversation(words)
    assert (found[0], found[1]) == ([1, 3, 2], [5])


def test_a_table_on_a_terminal_that_shows_ascii_alone(monkeypatch):
    rows = [("ours", "64 B"), ("plain", "128 B")]
    usual = text_table(("name", "bytes"), rows)
    monkeypatch.setattr("rich.console.Console.encoding", property(lambda self: "ascii"))
    assert text_table(("name", "bytes"), rows) == usual


def test_which_column_a_target_is():
    assert target_column(torch.tensor([1, 2, 4, 5, -100]), 2, 3).tolist() == [ELSEWHERE, 0, 2, ELSEWHERE, SKIP]


def test_numbers_of_a_compiler_are_not_looked_at():
    with FakeTensorMode():
        assert not inspectable(torch.zeros(2))
    assert not inspectable(torch.zeros(2, device="meta"))
    assert inspectable(torch.zeros(2))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_mean_of_a_single_logit(backend: str):
    """Of a vocabulary of one, and where all but one are masked."""
    one, masked = torch.tensor([[3.0], [-2.0]]), torch.tensor([[3.0, -torch.inf], [-torch.inf, -2.0]])
    for logits, target in ((one, [0, 0]), (masked, [0, 1])):
        out = ll.logprobs(logits, torch.tensor(target), stats=("mean_logit", "logit_variance"), backend=backend)
        assert out.mean_logit.tolist() == [3.0, -2.0]
        assert out.logit_variance.tolist() == [0.0, 0.0]


def test_a_term_may_round_what_all_but_cancels():
    """A gradient that is what is left of larger ones may be off by a few units in the last place of those."""
    whole = torch.tensor([1.0, 1e-14], dtype=torch.float64)
    for other, wanted in ((2e-14, False), (1e-12, True)):
        chunks = [{"logprob": torch.tensor([x], dtype=torch.float64)} for x in (1.0, other)]
        assert bool(differs(chunks, {"logprob": whole})) is wanted


def test_sglangs_own_temperature():
    arguments = SimpleNamespace(enable_fp32_lm_head=True, dtype="bfloat16")
    config = SimpleNamespace(vocab_size=9)
    assert Sampling.of_sglang({}, arguments, config).temperature == 1.0
    assert Sampling.of_sglang({"temperature": 0.7}, arguments, config).temperature == 0.7


def test_a_deferred_forward_is_named_as_the_heads_own():
    """Accelerate and others read the name and the parameters of what they wrap."""
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 3)})
    model.get_output_embeddings = lambda: model["lm_head"]
    ll.defer(model)
    forward: Any = model["lm_head"].forward
    assert (forward.__name__, forward.__wrapped__.__func__) == ("forward", torch.nn.Linear.forward)


def test_results_are_named_in_an_estimate():
    logits, rows = sized(64, 1000, 32)
    found = ll.estimate(ll.logprobs, logits, rows)
    assert any(item.name.startswith("results of each row") for item in (*found.forward, *found.backward))


def test_a_float32_head_beside_a_teacher_is_multiplied_apart():
    operands = [torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (512, 4096, 512, 4096)]
    hidden, weight, other, head = operands
    rows, teacher = torch.zeros(512, dtype=torch.int64, device="meta"), ll.Teacher(ll.Logits(other, head))
    for wide, why in ((weight.float(), "multiplied in parts"), (weight, None)):
        plan = ll.explain(ll.logprobs, ll.Logits(hidden, wide), rows, teacher=teacher, device="cuda")
        assert plan.apart is None if why is None else why in plan.apart


def test_chunks_of_two_models_in_one_kernel_cover_all_rows():
    """The largest of several chunks of rows, and not the last row, is what memory is for."""
    hidden, weight, other, head = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (8192, 4096) * 2)
    rows, teacher = torch.zeros(8192, dtype=torch.int64, device="meta"), ll.Teacher(ll.Logits(other, head))
    options = {"teacher": teacher, "device": "cuda"}
    whole, small = (
        ll.explain(ll.logprobs, ll.Logits(hidden, weight), rows, memory=m, **options) for m in ("1GiB", "64KiB")
    )
    assert whole.forward.rows == 8192
    assert small.forward.rows < 8192


def test_what_a_table_shows_is_shown_as_it_is():
    names = ["[red]x[/red]", ":smile:", "a 'text' of 3"]
    assert text_table(("name",), [(name,) for name in names]).splitlines()[2:] == names


def test_ids_that_are_not_among_logits_that_exist():
    """Of other shards, and of none: 0 here, to which the logit of the rank that has the id is added."""
    logits = torch.randn(3, 7)
    call, operands = resolve("logprobs", logits, torch.tensor([1, 2, 3]), Asked())
    ids = torch.tensor([[2, -1], [12, 6], [9, 3]])
    found = id_logits(operands, ids, replace(call, start=3, vocab_size=13))
    assert found.tolist() == [[0.0, 0.0], [0.0, float(logits[1, 3])], [float(logits[2, 6]), float(logits[2, 0])]]


def test_factors_of_rows_that_nobody_could_look_at():
    """On an accelerator; there a row whose factor is not above 0 is NaN, a student's and a teacher's."""
    torch.manual_seed(0)
    logits, other = (ll.Logits(torch.randn(3, 4), torch.randn(9, 4)) for _ in range(2))
    target, factors = torch.tensor([1, 2, 3]), torch.tensor([0.5, -1.0, torch.inf])
    own = ll.logprobs(like(logits, gain=factors), target).logprob
    taught = ll.logprobs(logits, target, teacher=like(other, gain=factors), stats=("teacher_top1",))
    assert own.isnan().tolist() == [False, True, True]
    assert taught.divergence.isnan().tolist() == [False, True, True]


def test_a_tile_has_room_for_what_further_terms_of_dz_take(monkeypatch):
    """Three more buffers, where a statistic adds a term of p squared or a constant."""
    told = []
    monkeypatch.setattr(tiled, "tile_shape", lambda problem, more=0: told.append(more) or (3, 7))
    one, z = torch.ones(3), torch.randn(3, 7)
    problem = Problem(z, None, torch.tensor([1, 2, 3]), one, 0.0, 7, False, 1 << 20)
    norm = Normaliser(0 * one, z.logsumexp(-1))
    for further in ({}, {"square": one}, {"constant": one}):
        tiled.gradient(problem, norm, Coefficients(one, None, one, **further), torch.empty(3, 7), None)
    assert told == [0, 3, 3]


@pytest.mark.parametrize(("device", "words"), [("cuda", "products"), ("cpu", "tiles")])
def test_a_plan_says_how_backward_of_a_divergence_goes(device: str, words: str):
    hidden, weight, other, head = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (8192, 4096) * 2)
    rows, teacher = torch.zeros(8192, dtype=torch.int64, device="meta"), ll.Teacher(ll.Logits(other, head))
    logits, options = ll.Logits(hidden, weight.requires_grad_()), {"divergence": "tv", "memory": "64KiB"}
    plan = ll.explain(ll.logprobs, logits, rows, teacher=teacher, device=device, **options)
    assert f"Backward in {words} of " in str(plan)


def test_a_shard_without_columns_has_one_slab_of_exponentials_or_no_tile():
    p = SimpleNamespace(
        call=SimpleNamespace(columns=0, depth=8, machine=SimpleNamespace(turns=False)),
        hidden=torch.zeros(1, 8, dtype=torch.bfloat16),
        gain=torch.zeros(1),
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    for fused, slabs in ((True, 0), (False, 1)):
        tiles = Tiles(4, 128, 4, 1 << 20, fused=fused)
        assert Exponentials.empty(p, 4, tiles).reference.shape == (slabs, 4)  # pyright: ignore[reportArgumentType]


def test_how_many_columns_have_numbers():
    """Float32 lines hold numbers of columns, up to the largest integer that they have exactly."""
    at = (Asked(top_k=1), torch.device("cpu"), 3, (3,))
    checks.check_readings("logprobs", *at, LARGEST)
    with pytest.raises(ll.LogitlessError, match=f"take up to {LARGEST} columns, not {LARGEST + 1}"):
        checks.check_readings("logprobs", *at, LARGEST + 1)


def test_how_many_columns_have_canonical_bits():
    """Sums of blocks have room for so many; a call of this size is never made."""

    def call(vocab_size: int) -> Any:
        return SimpleNamespace(
            caller="logprobs", bits="canonical", shard=None, kept=None, vocab_size=vocab_size, backend=tiled
        )

    checks.check_bits(call(blocks.LARGEST))
    with pytest.raises(ll.LogitlessError, match=f"room for sums of {blocks.LARGEST} columns, and there are"):
        checks.check_bits(call(blocks.LARGEST + 1))


def test_how_large_a_number_may_be():
    assert all(is_number(x) for x in (2**62, -(2**62), 2.0**62))
    assert not any(is_number(x) for x in (2**62 + 1, 2.0**63, True, "1"))


@pytest.mark.parametrize(("lines", "chunks"), [(4, [(0, 2), (2, 4), (4, 6)]), (6, [(0, 3), (3, 6)]), (12, [(0, 6)])])
def test_half_of_the_memory_is_for_a_teacher_beside_logits(lines: int, chunks: list[tuple[int, int]]):
    """The other half is for the work of its rows."""
    logits, teacher = (
        torch.randn(6, 50, requires_grad=True),
        ll.Teacher(ll.Logits(torch.randn(6, 4), torch.randn(50, 4))),
    )
    plan = ll.explain(ll.logprobs, logits, torch.arange(6), teacher=teacher, divergence="tv", memory=lines * 50 * 4)
    assert (plan.kind, list(plan.chunks)) == ("given", chunks)
    assert plan.elementwise == lines * 50 * 4 // 2


def test_a_deferred_model_is_told_to_the_log(caplog, monkeypatch):
    monkeypatch.setattr("logitless.notes._LOGGED", set())
    with caplog.at_level("INFO", logger="logitless"):
        ll.defer(torch.nn.Sequential(OrderedDict(lm_head=torch.nn.Linear(4, 7)))).undo()
    assert "deferred the head of Sequential, logits are not computed" in caplog.text
