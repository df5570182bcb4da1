"""The scaling benchmark: names of slopes, the model of crowds, and pages that agree with the committed figures."""

import math
import random

import crowd_model
import document
import drawing
import figures
import fleet
import pytest
import slopes

import scale

SIZES = [4**power for power in range(11)]


def points(cost, noise=0.04):
    """Costs at every size, with the noise of a clock."""
    dice = random.Random(7)  # noqa: S311  (a fixed play)
    return [(size, cost(size) * (1 + noise * dice.uniform(-1, 1))) for size in SIZES]


@pytest.mark.parametrize(
    ("shape", "exponent", "cost"),
    [
        ("constant", 0.0, lambda _: 85.0),
        ("logarithmic", 0.07, lambda size: 20 + 18 * math.log2(size)),
        ("linear", 1.0, lambda size: 3.5 * size),
        ("linear", 1.0, lambda size: 1200 + 0.31 * size),
        ("quadratic", 2.0, lambda size: 50 + 0.002 * size * size),
        ("power", 0.5, lambda size: 9 * math.sqrt(size)),
        ("power", 1.5, lambda size: 0.1 * size**1.5),
    ],
)
def test_a_slope_is_named_for_what_it_is(shape, exponent, cost):
    found = slopes.named(points(cost))
    assert found.shape == shape
    assert found.exponent == pytest.approx(exponent, abs=0.06)
    assert found.superlinear == (exponent > 1.15)
    assert found.error < 0.05
    assert ("SUPERLINEAR" in found.text("ns", "one")) == found.superlinear


WAIT, CORE = crowd_model.Stage("", 0.03), crowd_model.Stage("core", 0.01)


@pytest.mark.parametrize(
    ("stages", "servers", "rates"),
    [
        ([CORE], 1, {8: 100}),
        ([CORE], 3, {1: 100, 2: 200, 3: 300, 4: 300}),
        ([WAIT, CORE], 1, {1: 25, 2: 50, 4: 100, 9: 100}),  # all wait at the same time
    ],
)
def test_exact_times_give_the_rate_of_the_busiest_stage(stages, servers, rates):
    for clients, rate in rates.items():
        out = crowd_model.run(clients, stages, {"core": servers}, rounds=4000)
        assert out.rate == pytest.approx(rate, rel=0.01)
        assert out.used["core"] == pytest.approx(rate * 0.01 / servers, abs=0.01)
        if clients == 8:
            assert (out.p50, out.p99) == (pytest.approx(0.08), pytest.approx(0.08))


@pytest.mark.parametrize(
    ("file", "constant", "said"),
    [
        ("session/registry.rs", "MAX_LINKS: usize = 4096;", "4,096"),
        ("session/limits.rs", "pending: (descriptors / 16).clamp(16, 256)", "a sixteenth of the open-file limit"),
        ("session/call_slots.rs", "const SHARED: usize = 32;", "up to 32 shared threads"),
        ("session/known_cache.rs", "MAX_STORED_BYTES: u64 = 4 << 20;", "more than 4 MiB of descriptions"),
        ("session/call_pool.rs", "MAX_CALLS: usize = 64;", "at most 64"),
        ("session/call_pool.rs", "IDLE_STREAMS: usize = 2;", "two are kept once idle"),
        ("net/mod.rs", "BACKLOG: u16 = 1024;", "1,024 connections wait"),
        ("session/membership.rs", "Duration::from_millis(20)..=Duration::from_secs(1);", "from 20 ms to 1 s"),
        ("memory/generations.rs", "ENTRIES: u32 = 1 << 24;", "128 MiB of address space"),
    ],
)
def test_the_limits_that_the_page_names_are_those_of_the_code(file, constant, said):
    page = " ".join(document.PAGE.read_text().split())
    assert constant in (figures.FOLDER.parents[1] / "crates" / "core" / "src" / file).read_text()
    assert said in page
    assert fleet.MAX_LINKS == 4096


COMMITTED = figures.Figures(figures.document()[1])


def test_the_page_and_the_picture_say_what_the_figures_say():
    source, _ = figures.document()
    page, rewrite = document.PAGE.read_text(), "python benches/scaling --write"
    assert page == document.filled(page, COMMITTED, source.name), rewrite
    with pytest.raises(ValueError, match="no marks for"):
        document.filled("# Scaling\n", COMMITTED, "scale.json")
    picture = drawing.drawn(COMMITTED)
    assert (figures.PICTURES / "scale.svg").read_text() == picture, rewrite
    assert picture.count("<path") > 100
    assert all(title in picture for title, _, _ in drawing.PANELS)


def test_the_comparison_shows_every_curve(tmp_path):
    _, written = figures.document()
    section = scale.section(written)
    assert all(f"| {shown['name']} |" in section for shown in written["curves"] + written["figures"])
    scale.draw(written, tmp_path)
    assert (tmp_path / "scale.svg").read_text() == (figures.PICTURES / "scale.svg").read_text()
