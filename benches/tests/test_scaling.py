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
    """Costs at every size, off by as much as clocks are."""
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


def test_a_fit_by_hand():
    # 1/y = 1, 1/2, 1/4 and x/y = 1, 1, 1: sums aa = 21/16, ab = 7/4, bb = 3, a = 7/4, b = 3; across = 14/16.
    assert slopes.relative([1, 2, 4], [1, 2, 4]) == pytest.approx((0, 1))
    assert slopes.relative([0, 0, 0], [2, 2, 2]) == pytest.approx((2, 0))
    # A line that would start below nothing starts at nothing, and costs what is nearest: the mean of 4 and 4.
    fixed, each = slopes.relative([1, 10], [1, 40])
    assert fixed == 0
    assert each == pytest.approx((1 + 0.25) / (1 + 0.0625))


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (lambda size: 100 if size < 5000 else 180, "nearly constant, 100 to 180 ns"),
        (lambda size: 10 if size < 5000 else 40 * (size / 4096) ** 0.6, "no simple shape, from 10 to 1,114 ns"),
        # A curve that changes on the way may be plain at its end.
        (lambda size: size * min(size, 4096), "linear at the end, from 1 to 4,294,967,296 ns"),
        (lambda size: min(size, 64), "constant at the end, from 1 to 64 ns"),
    ],
)
def test_a_curve_is_described_by_what_it_shows(cost, text):
    assert slopes.named([(size, cost(size)) for size in SIZES]).text("ns", "one") == text


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


def repairmen(clients, think, work, servers):
    """The rate of a closed system of random times, from its balance equations: the naive twin."""
    weights = [1.0]
    for waiting in range(1, clients + 1):
        arriving = (clients - waiting + 1) / think
        leaving = min(waiting, servers) / work
        weights.append(weights[-1] * arriving / leaving)
    whole = sum(weights)
    return sum(weight / whole * min(waiting, servers) / work for waiting, weight in enumerate(weights))


@pytest.mark.parametrize("clients", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("servers", [1, 2])
def test_random_times_give_what_queueing_theory_says(clients, servers):
    stages = [crowd_model.Stage("", 0.05, exact=False), crowd_model.Stage("core", 0.01, exact=False)]
    out = crowd_model.run(clients, stages, {"core": servers}, rounds=40_000, seed=clients)
    assert out.rate == pytest.approx(repairmen(clients, 0.05, 0.01, servers), rel=0.02)
    # Little: clients = rate * time, all of it spent thinking, waiting or being served.
    assert out.used["core"] == pytest.approx(out.rate * 0.01 / servers, rel=0.03)


@pytest.mark.parametrize(
    ("file", "constant", "said"),
    [
        ("session/registry.rs", "MOST_LINKS: usize = 4096;", "4,096"),
        ("session/limits.rs", "pending: (descriptors / 16).clamp(4, 256)", "a sixteenth of the open-file limit"),
        ("session/call_slots.rs", "const SHARED: usize = 32;", "up to 32 shared threads"),
        ("session/remote_cache.rs", "MOST_RECORDS: usize = 1 << 16;", "65,536 names"),
        ("session/stream_pool.rs", "MOST_CALLS: usize = 64;", "at most 64"),
        ("session/call_streams.rs", "IDLE_STREAMS: usize = 2;", "two are kept once idle"),
        ("net/mod.rs", "BACKLOG: u16 = 1024;", "1,024 connections wait"),
        ("session/member_search.rs", "Duration::from_millis(20)..=Duration::from_secs(1);", "from 20 ms to 1 s"),
        ("memory/generations.rs", "PLACES: u32 = 1 << 24;", "128 MiB of address space"),
    ],
)
def test_the_limits_that_the_page_names_are_those_of_the_code(file, constant, said):
    page = " ".join(document.PAGE.read_text().split())
    assert constant in (figures.FOLDER.parents[1] / "crates" / "core" / "src" / file).read_text()
    assert said in page
    assert fleet.MOST_LINKS == 4096


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


def test_every_curve_that_is_used_was_measured_up_to_its_largest_size():
    assert not COMMITTED.quick
    assert {name for _, _, names in drawing.PANELS for name in names} <= {curve.name for curve in COMMITTED.curves}
    assert all(len(curve.points) >= 2 for curve in COMMITTED.curves)
    groups = {"keys", "caches", "asked", "links", "blocks", "cores", "fan", "storm", "memory"}
    assert groups <= {curve.group for curve in COMMITTED.curves}
    for name, size in [
        ("look up a key", 1_000_000),
        ("find a cache by id", 100_000),
        ("make one more link, shm", 512),
        ("pull, shm of blocks of 4096 bytes", 65_536),
        ("bytes pulled from one engine, tcp", 512),
        ("all are linked again, tcp", 512),
    ]:
        sizes = [point[0] for point in COMMITTED.curve(name).points]
        assert (sizes[0], sizes[-1] >= size) == (1, True), name
