"""Curves that are fitted to measurements, and network.json: written, read, and refused where it is
damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.planning.measurement import (
    FORMAT,
    CollectiveCurve,
    Curve,
    NetworkMeasurement,
    PairMeasurement,
    TransportMeasurement,
    find_network,
    from_json,
    read_measurement,
    to_json,
    write_measurement,
)

SIZES = [8 * 4**i for i in range(10)]


def test_a_line_is_fitted_by_two_points() -> None:
    curve = Curve.fit({size: 20e-6 + size / 1e9 for size in SIZES})
    assert len(curve.sizes) == 2 and curve.residual < 1e-9
    assert curve.bandwidth == pytest.approx(1e9) and curve.at(1 << 24) == pytest.approx(
        20e-6 + (1 << 24) / 1e9
    )


def test_a_bend_is_found_and_the_residual_is_that_of_the_worst_point() -> None:
    points = {float(size): max(50e-6, size / 1e8) for size in SIZES}
    curve = Curve.fit(points)
    assert 3 <= len(curve.sizes) <= 5
    assert curve.residual == pytest.approx(max(abs(curve.at(s) - t) / t for s, t in points.items()))
    assert Curve.fit(points, most=2).residual > curve.residual


def test_noise_does_not_make_a_curve_fall() -> None:
    curve = Curve.fit({8.0: 3e-4, 1e3: 1e-4, 1e5: 5e-4, 1e6: 2e-4})
    assert [*curve.seconds] == sorted(curve.seconds) and curve.residual > 0.1
    assert curve.at(1e9) > 0 and Curve((8.0, 16.0, 24.0), (1.0, 3.0, 3.0)).bandwidth == 8.0


def test_a_curve_needs_durations() -> None:
    for points in ({}, {8.0: 0.0}, {8.0: math.inf}):
        with pytest.raises(ConfigError):
            Curve.fit(points)


def made(noise: float = 0.1) -> NetworkMeasurement:
    curve = Curve((8.0, 1e6), (1e-5, 1.01e-3), 0.01)
    collectives = {"all_reduce": CollectiveCurve(curve, noise, curve, 0.2)}
    gloo = TransportMeasurement(collectives, (PairMeasurement((0, 1), curve, 0.05),), 1.2)
    return NetworkMeasurement(FORMAT, 2, ((0,), (1,)), 2, {"gloo": gloo}, 5e9, 0.02, "here")


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    write_measurement(path, made())
    assert read_measurement(path) == made() == find_network(str(path))
    assert (
        made().link().bandwidth == pytest.approx((1e6 - 8) / 1e-3) and made().link().latency == 1e-5
    )


def test_noise_decides_whether_it_is_a_result() -> None:
    assert made(0.1).is_result and not made(0.5).is_result
    assert made(0.5).noise == 0.5


def _set(*path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-2]:
            document = document[key]
        document[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_set("format", "lockstep network 9"), "expected the format"),
        (_set("copy_bandwidth", 0), "copy bandwidth above 0"),
        (_set("workers", 3), "expected the ranks 0 to 2"),
        (_set("hosts", "a"), "Expected"),
        (
            _set("transports", "gloo", "pairs", 0, "idle", "seconds", [1e-5, 1e-6]),
            "seconds that do not fall",
        ),
        (_set("transports", "gloo", "pairs", 0, "ranks", [0, 5]), "a pair of ranks from 0 to 1"),
        (
            _set("transports", "gloo", "collectives", "all_reduce", "idle", "seconds", [0, 1]),
            "seconds above 0",
        ),
        (
            _set("transports", "gloo", "collectives", "all_reduce", "idle", "sizes", [9, 8]),
            "ascending sizes",
        ),
        (
            _set("transports", "gloo", "collectives", "all_reduce", "idle", "sizes", []),
            "as many sizes as seconds",
        ),
    ],
)
def test_damaged_files_are_refused_with_one_line(change: Callable[[Any], None], told: str) -> None:
    document = json.loads(to_json(made()))
    change(document)
    with pytest.raises(DataError, match=told) as caught:
        from_json(json.dumps(document), "network.json")
    assert str(caught.value).startswith("network.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 3}', "NaN", '{"a": 1}', "[" * 100_000])
def test_other_files_are_refused_with_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_measurement(path)
    assert "\n" not in str(caught.value) and "network.json" in str(caught.value)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        find_network(str(tmp_path / "network.json"))
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not a text file"):
        find_network(str(tmp_path / "x.json"))
    with pytest.raises(ConfigError, match="the file of a measurement"):
        find_network("nothing")
