"""Products with epilogues against their twins in float64: the product first, then what the reference backend does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from truth import plain, truth

from logitless.backends import load, reference
from logitless.backends.contract import Problem, Product, Running
from logitless.backends.triton import products
from logitless.product_table import ProductSizes, product_sizes
from logitless.softmax import ELSEWHERE, SKIP, Coefficients, Normaliser, Statistic, coefficients, normaliser

# NumPy, which runs the kernels in Triton's interpreter, reports the maximum of rows that are NaN and left out.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

INF = torch.inf
ROWS, COLUMNS, WIDTH = 37, 101, 40
SIZES = ProductSizes(rows=16, columns=32, depth=16, tiles=2, band=2)
"""Three blocks of rows, four tiles in two groups, three steps of a product; the last of each goes over the edge."""
TURNS = SIZES._replace(rows=64, tiles=1, warps=4, stages=3, turns=True)
"""The same tiles by turns, which a group of warps takes 64 rows for at least: a block, and two units of two parts."""
LINES = ("m", "s", "w", "t", "t - m")


@pytest.fixture
def sizes(turns: bool) -> ProductSizes:
    return TURNS if turns else SIZES


def make(device, rows=ROWS, columns=COLUMNS, dtype=torch.bfloat16, bias=False, first=0, **options) -> Product:
    """Targets in every tile, before and after the columns, elsewhere, and a row to skip whose logits are NaN."""
    hidden, weight = torch.randn(rows, WIDTH, device=device), torch.randn(columns, WIDTH, device=device)
    column = torch.arange(rows, device=device) * 3 % (columns + 8) + first - 2
    if rows > 5:
        column[3], column[5] = ELSEWHERE, SKIP
        hidden[5] = torch.nan
    return Product(
        hidden.to(dtype),
        weight.to(dtype),
        torch.randn(columns, device=device) if bias else None,
        column,
        torch.linspace(0.5, 1.5, rows, device=device) * (-1 if options.get("negative") else 1),
        first=first,
        **options,
    )


def twin(p: Product, dtype: torch.dtype) -> Problem:
    """The same as logits that exist, from a product in ``dtype``; in float32 on a GPU, the library's from 16 bits."""
    if dtype == torch.float32 and p.hidden.is_cuda:
        logits = torch.mm(p.hidden, p.weight.T, out_dtype=dtype)
    else:
        logits = p.hidden.to(dtype) @ p.weight.to(dtype).T
    logits = logits if p.bias is None else logits + p.bias.to(dtype)
    if p.logits_dtype != torch.float32:
        logits = logits.to(p.logits_dtype).to(dtype)
    return Problem(logits, None, p.column, p.gain.to(dtype), p.squash, p.columns, p.entropy, 1 << 20, p.first)


def assert_statistic(p: Product, ours: Tensor) -> None:
    """Each line as close to float64 as the twin's in float32, and what a skipped row has by definition."""
    skipped = p.column == SKIP
    exact, plain = (reference.statistics(twin(p, dtype)) for dtype in (torch.float64, torch.float32))
    # Both are float32 numbers of the size of m, and so is what their difference can be off by.
    size = exact[0].abs().clamp_min(1.0)
    relative = [torch.stack([*x, (x[3] - x[0]) / size.to(x.dtype)]) for x in (ours, exact, plain)]
    for name, *lines in zip(LINES, *relative, strict=True):
        if name != "w" or p.entropy:
            assert_close_to_truth(*(line[~skipped] for line in lines), name=name)
    nothing = torch.tensor([0.0, 1.0, 0.0, 0.0], device=ours.device)[:, None]
    assert torch.equal(ours[:, skipped], nothing.expand(4, int(skipped.sum())))


def terms(p: Product, dtype: torch.dtype, entropy: bool) -> tuple[Normaliser, Coefficients]:
    """Normaliser and coefficients for random upstream gradients; rows without a target here have one elsewhere."""
    row = Statistic.of(reference.statistics(twin(p, torch.float64)))
    row = row._replace(t=torch.where(row.t.isnan(), row.m - 1.0, row.t))
    norm, (upstream, by_entropy) = normaliser(row), torch.randn(2, p.rows, device=p.gain.device).double()
    logprob = row.t - norm.reference - norm.log_sum
    coef = coefficients(logprob, norm, row.w / row.s, upstream, by_entropy if entropy else None, None)
    return Normaliser(*(x.to(dtype) for x in norm)), Coefficients(*(None if x is None else x.to(dtype) for x in coef))


OPTIONS = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "bias": {"bias": True},
    "softcap": {"squash": 1 / 9, "bias": True},
    "negative scale": {"negative": True},
    "later columns": {"first": 50},
    "no entropy": {"entropy": False},
    "one row": {"rows": 1},
    "one column": {"columns": 1},
    "even": {"rows": 32, "columns": 128},
    "whole tiles, half a unit": {"columns": 96},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_statistics(options: dict, device: torch.device, sizes: ProductSizes):
    p = make(device, **options)
    assert_statistic(p, products.statistics(p, sizes=sizes))


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_results_of_rows(spread: float, device: torch.device, sizes: ProductSizes):
    """By an oracle that knows of no statistic, also where logits are tens apart. Rows enough that plain torch is not
    lucky in all of them."""
    p = make(device, 4 * ROWS)
    index = torch.arange(p.rows, device=device)[p.column.clamp(0, COLUMNS - 1) == p.column]
    p = replace(p, weight=p.weight * spread)
    row = Statistic.of(products.statistics(p, sizes=sizes)[:, index])
    norm = normaliser(row)
    ours = (row.t - row.m - norm.log_sum, norm.log_sum - row.w / row.s, norm.reference + norm.log_sum)
    given = index, p.column[index]
    right = truth(twin(p, torch.float64).logits, *given, temperature=1 / p.gain[index].double())
    theirs = plain(twin(p, torch.float32).logits, *given, temperature=1 / p.gain[index])
    for name, *values in zip(right._fields, ours, right, theirs, strict=True):
        assert_close_to_truth(*values, name=name)


@pytest.mark.parametrize("match", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_rounded_once_and_after_the_bias(match: torch.dtype, device: torch.device, sizes: ProductSizes):
    """Operands of few bits, so that products are exact, and every logit is rounded to the same number."""
    p = make(device, bias=True, logits_dtype=match)
    p = replace(p, **{name: (getattr(p, name) * 32).round() / 32 for name in ("hidden", "weight", "bias")})
    exact = twin(replace(p, logits_dtype=torch.float32), torch.float32).logits
    assert (twin(p, torch.float32).logits != exact).float().mean() > 0.5
    assert_statistic(p, products.statistics(p, sizes=sizes))
    out = torch.full((p.rows, p.columns), torch.nan, device=device, dtype=p.hidden.dtype)
    assert_gradient(p, out, True, sizes)


def assert_gradient(p: Product, out: Tensor, entropy: bool, sizes: ProductSizes) -> None:
    torch.manual_seed(1)
    norm, coef = terms(p, torch.float64, entropy)
    truth = torch.empty(out.shape, device=out.device, dtype=torch.float64)
    reference.gradient(twin(p, torch.float64), norm, coef, truth, None)
    near = Normaliser(*(x.float() for x in norm)), Coefficients(*(None if x is None else x.float() for x in coef))
    plain = torch.empty_like(out)
    reference.gradient(twin(p, torch.float32), *near, plain, None)
    products.gradient(p, *near, out, sizes)
    assert_gradient_close_to_truth(out, truth, plain)
    # The norm is that of the targets' elements, nearly; the others count by themselves.
    others = torch.arange(p.first, p.first + p.columns, device=out.device) != p.column[:, None]
    assert_gradient_close_to_truth(out[others], truth[others], plain[others], "others")
    assert (out[p.column == SKIP] == 0).all()


GRADIENTS = {
    "plain": {"entropy": False},
    "entropy": {"entropy": True},
    "float16": {"dtype": torch.float16, "entropy": True},
    "softcap": {"squash": 1 / 9, "bias": True, "entropy": True},
    "softcap alone": {"squash": 1 / 9, "entropy": False},
    "later columns": {"first": 50, "bias": True, "entropy": False},
    "negative scale": {"negative": True, "entropy": True},
    "even": {"rows": 32, "columns": 128, "entropy": True},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
def test_gradient(options: dict, device: torch.device, sizes: ProductSizes):
    options = dict(options)
    entropy = options.pop("entropy")
    p = make(device, **options)
    assert_gradient(p, torch.full((p.rows, p.columns), torch.nan, device=device, dtype=p.hidden.dtype), entropy, sizes)


@pytest.mark.parametrize(
    ("columns", "stride", "start", "described"),
    [(104, 128, 8, True), (101, 128, 8, False), (104, 128, 5, False), (104, 113, 8, False)],
)
def test_gradient_into_part_of_a_buffer(
    columns: int, stride: int, start: int, described: bool, device: torch.device, sizes: ProductSizes
):
    """Through a descriptor where the rows are whole chunks of 16 bytes; nothing beside them is touched."""
    p = make(device, columns=columns)
    buffer = torch.full((ROWS + 1, stride), 7.0, device=device, dtype=torch.bfloat16)
    out = buffer[:ROWS, start : start + columns]
    assert products.written(out, sizes.rows, sizes.columns)["DESCRIBED"] is described
    assert_gradient(p, out, True, sizes)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def assert_exponentials(p: Product, values: Tensor, references: Tensor, sizes: ProductSizes) -> None:
    """References are maxima of tiles; exponentials are rounded once, and 0 at targets and in skipped rows."""
    z, _ = reference.transformed(twin(p, torch.float64))
    tops = torch.stack([tile.amax(1) for tile in z.split(sizes.columns, 1)])
    read = p.column != SKIP
    torch.testing.assert_close(references[:, read].double(), tops[:, read], rtol=1e-6, atol=1e-6)
    wanted = (z - references.double().repeat_interleave(sizes.columns, 0)[: p.columns].T).exp()
    at = torch.arange(p.first, p.first + p.columns, device=z.device) == p.column[:, None]
    wanted = wanted.masked_fill(at | ~read[:, None], 0.0)
    assert_gradient_close_to_truth(values, wanted, wanted.to(values.dtype), "exponentials")


@pytest.mark.parametrize(
    ("options", "aligned", "steps"),
    [({}, True, 1), ({"dtype": torch.float16, "first": 50}, False, 16)],
    ids=["bfloat16", "float16"],
)
def test_exponentials_become_gradients(
    options: dict, aligned: bool, steps: int, monkeypatch, device: torch.device, sizes: ProductSizes
):
    """By the kernel that there is, and by its twin; as good as exponentials of logits that exist."""
    # Whole chunks of 16 bytes, which are stored through a descriptor, or not.
    columns, width = (104, 128) if aligned else (COLUMNS, COLUMNS)
    p = make(device, columns=columns, **options)
    dtype, slab = p.hidden.dtype, sizes.columns
    values = torch.full((ROWS, width), torch.nan, device=device, dtype=dtype)[:, :columns]
    references = torch.full((-(-columns // slab), ROWS), torch.nan, device=device)
    stats = products.exponentials(p, values, references, sizes=sizes)
    assert_statistic(p, stats)
    assert_exponentials(p, values, references, sizes)
    norm, coef = terms(p, torch.float32, True)
    truth = torch.empty(ROWS, columns, device=device, dtype=torch.float64)
    wide = Normaliser(*(x.double() for x in norm)), Coefficients(*(x.double() for x in coef[:3]))
    reference.gradient(twin(p, torch.float64), *wide, truth, None)
    problem, plain = twin(p, torch.float32), torch.empty_like(values)
    running = Running(*torch.zeros(2, ROWS, device=device))
    reference.exponentials(problem, torch.empty(4, ROWS, device=device), running, plain, False)
    reference.gradient_from(replace(problem, logits=plain), running.reference[None], columns, norm, coef, plain)
    # Two programs to a row, of which the second has tiles past the last column.
    monkeypatch.setattr(products, "gradient_from_tiles_sizes", lambda _: {"TILES": 2, "STEPS": steps})
    for name, write in (
        ("reference", reference.gradient_from),
        ("wide slabs", load("triton").gradient_from),
        ("tiles", products.gradient_from),
    ):
        out = torch.full_like(values, torch.nan)
        write(replace(problem, logits=values), references, slab, norm, coef, out)
        assert_gradient_close_to_truth(out, truth, plain, name)
        assert (out[p.column == SKIP] == 0).all()
    over = values.clone()
    products.gradient_from(replace(problem, logits=over), references, slab, norm, coef, over)
    assert torch.equal(over, out)


def test_tiles_and_rows_of_minus_infinity(device: torch.device, sizes: ProductSizes):
    """A first tile, a first group and a last column that a bias rules out, and a row of nothing but -inf."""
    p = make(device, bias=True)
    bias = p.bias - 300.0
    bias[:70], bias[-1] = -INF, -INF
    p = replace(p, bias=bias, gain=p.gain.abs())
    values = torch.full((ROWS, COLUMNS), torch.nan, device=device, dtype=torch.bfloat16)
    references = torch.empty(4, ROWS, device=device)
    stats = products.exponentials(p, values, references, sizes=sizes)
    assert_statistic(p, stats)
    read = p.column != SKIP
    assert (references[:2, read] == -INF).all()
    assert references[2:].isfinite().all()
    assert (values[:, :70] == 0).all()
    nothing = replace(p, bias=torch.full_like(bias, -INF))
    m, s, w, _ = products.statistics(nothing, sizes=sizes)[:, read]
    assert (m == -INF).all()
    assert (s == 0).all()
    assert (w == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
def test_rows_without_a_distribution_are_nan_and_alone(bad: float, device: torch.device, sizes: ProductSizes):
    p = make(device)
    clean = products.statistics(p, sizes=sizes)
    hidden = p.hidden.clone()
    hidden[7, 9] = bad
    ours = products.statistics(replace(p, hidden=hidden), sizes=sizes)
    others = torch.arange(ROWS, device=device) != 7
    assert ours[1, 7].isnan()
    assert torch.equal(ours[:, others].nan_to_num(9.0), clean[:, others].nan_to_num(9.0))


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device, sizes: ProductSizes):
    rows, sizes = 130, sizes._replace(rows=max(32, sizes.rows), depth=32)
    p = make(device, rows)
    values = torch.empty(rows, COLUMNS, device=device, dtype=torch.bfloat16)
    references = torch.empty(4, rows, device=device)
    whole = products.exponentials(p, values, references, sizes=sizes)
    norm, coef = terms(p, torch.float32, True)
    d_z = torch.empty_like(values)
    products.gradient(p, norm, coef, d_z, sizes)
    for start, stop in ((0, 1), (129, 130), (4, 7), (11, 28), (1, 130)):
        some = slice(start, stop)
        part = replace(p, hidden=p.hidden[some], column=p.column[some], gain=p.gain[some])
        assert same(products.statistics(part, sizes=sizes), whole[:, some])
        if stop - start < 20:
            e, r = torch.empty_like(values[some]), torch.empty_like(references[:, some]).contiguous()
            products.exponentials(part, e, r, sizes=sizes)
            assert same(e, values[some])
            assert same(r, references[:, some])
            products.gradient(part, norm.cut(some), coef.cut(some), e, sizes)
            assert same(e, d_z[some])


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, where NaN is NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_the_sizes_that_are_used(device: torch.device, sizes: ProductSizes):
    """Whole tiles of the real sizes, and columns enough for more than one part."""
    p = make(device, 5, columns=600, turns=sizes.turns)
    used = product_sizes(600, WIDTH, turns=p.turns)
    assert used.turns == sizes.turns
    assert used.groups(600) > 1
    assert_statistic(p, products.statistics(p))
    assert_gradient(p, torch.empty(5, 600, device=device, dtype=torch.bfloat16), True, used)


@pytest.mark.parametrize(("rows", "columns"), [(0, 40), (3, 0), (0, 0)])
def test_nothing_to_multiply(rows: int, columns: int, device: torch.device):
    p = Product(
        torch.zeros(rows, 8, device=device, dtype=torch.bfloat16),
        torch.zeros(columns, 8, device=device, dtype=torch.bfloat16),
        None,
        torch.full((rows,), ELSEWHERE, device=device),
        torch.ones(rows, device=device),
    )
    stats = products.statistics(p)
    assert stats.shape == (4, rows)
    assert (stats[0] == -INF).all()
    assert (stats[1] == 0).all()
    assert stats[3].isnan().all()
    numbers = torch.ones(rows, device=device)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    products.gradient(p, Normaliser(numbers, numbers), Coefficients(numbers, None, numbers), out)


def test_a_dry_run_allocates_the_parts_and_no_more():
    """20 MB where float32 logits would be 10 GB; no kernel is launched, and none of its sizes depends on the rows."""
    rows, columns, width = 16384, 151936, 4096
    operands = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, columns))
    column, gain = torch.empty(rows, dtype=torch.int64, device="meta"), torch.empty(rows, device="meta")
    p = Product(*operands, None, column, gain)
    assert products.takes(p.hidden, p.weight) is None
    assert products.statistic_parts(p).shape == (66, 4, rows)
    assert products.statistics(p).shape == (4, rows)


def test_operands_that_are_refused(device: torch.device):
    x = torch.zeros(5, 64, device=device, dtype=torch.bfloat16)
    assert products.takes(x, x) is None
    assert products.takes(x[:, :48], x[1:, 16:]) is None
    assert products.takes(x.half(), x.half()) is None
    assert products.takes(x.to("meta"), x.to("meta")) is None
    refused = {
        "not torch.float32": (x.float(), x.float()),
        "hidden is torch.bfloat16 and weight torch.float16": (x, x.half()),
        "hidden has 63 columns, not a multiple of 8": (x[:, :63], x[:, :63]),
        "rows of hidden are not contiguous": (x[:, ::2], x[:, :32]),
        "rows of weight are not contiguous or do not begin at multiples of 16 bytes": (x[:, :32], x[:, 1:33]),
        "rows of weight are not": (x[:, :40], torch.zeros(5, 41, device=device, dtype=x.dtype)[:, :40]),
    }
    for text, operands in refused.items():
        assert text in str(products.takes(*operands))


def test_without_a_card_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(products, "interpreted", lambda: False)
    x = torch.zeros(5, 64, dtype=torch.bfloat16)
    assert "the kernels run on CUDA devices, and hidden is on cpu" in str(products.takes(x, x))


def test_of_equal_parts_the_first_column_counts(device: torch.device):
    """In whatever order they come: by turns that of the columns is another."""
    rows, count = 9, 7
    x = torch.zeros(rows, 8, device=device, dtype=torch.bfloat16)
    p = Product(
        x, x, None, torch.zeros(rows, device=device, dtype=torch.int64), torch.ones(rows, device=device), top=True
    )
    for _ in range(5):
        parts = torch.ones(count, 5, rows, device=device)
        parts[:, 0], parts[:, 3] = torch.randint(3, (count, rows), device=device).float(), torch.nan
        parts[:, 4] = torch.stack([torch.randperm(100, device=device)[:count] for _ in range(rows)], 1).float()
        nothing = torch.rand(count, rows, device=device) < 0.2
        nothing[0] = False
        parts[:, 0] = parts[:, 0].masked_fill(nothing, -INF)
        parts[:, 1] = parts[:, 1].masked_fill(nothing, 0.0)
        largest = parts[:, 0].amax(0)
        first = torch.where(parts[:, 0] == largest, parts[:, 4], INF).amin(0)
        assert torch.equal(products.merge(p, parts)[4:], torch.stack([largest, first]))


@pytest.mark.parametrize("width", [512, 2048, 4096])
def test_canonical_sums_do_not_bind_the_sizes_of_dz(width: int, turns: bool, monkeypatch):
    found = []
    monkeypatch.setattr(products, "launch", lambda kernel, programs, **given: found.append((kernel, programs)))
    x, weight, row = torch.zeros(300, width).bfloat16(), torch.zeros(700, width).bfloat16(), torch.zeros(300)
    for canonical in (False, True):
        p = Product(x, weight, None, row.long(), row, canonical=canonical, turns=turns)
        out = torch.zeros(300, 700).bfloat16()
        products.gradient(p, Normaliser(row, row), Coefficients(row, row, row), out)
    assert found[0] == found[1]
    assert found[0][0].startswith("turns" if turns else "product")


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_the_largest_logit_and_its_column(negative: bool, stored: bool, device: torch.device, sizes: ProductSizes):
    """Of whole numbers, so that equal logits are equal: the first of several, in other tiles and groups too, and by
    turns in a later part."""
    p, sizes = make(device, negative=negative, top=True, first=7), sizes._replace(tiles=2)
    hidden, weight = (torch.randint(-2, 3, x.shape, device=device).to(x.dtype) for x in (p.hidden, p.weight))
    weight[-20:] = weight[:20]
    weight[40:52] = weight[:12]
    # By turns, tiles 0 and 2 are the first part of four, and 1 and 3 the second.
    weight[74:81] = weight[52:59]
    p = replace(p, hidden=hidden, weight=weight)
    if stored:
        values = torch.empty(ROWS, COLUMNS, device=device, dtype=hidden.dtype)
        references = torch.empty(-(-COLUMNS // sizes.columns), ROWS, device=device)
        found = products.exponentials(p, values, references, sizes=sizes)
    else:
        found = products.statistics(p, sizes=sizes)
    assert_statistic(p, found[:4])
    keys, columns = reference.best(twin(p, torch.float64), 1, negative)
    read = p.column != SKIP
    assert torch.equal(found[4, read].double(), keys[0, read])
    assert torch.equal(found[5, read].double(), columns[0, read])
