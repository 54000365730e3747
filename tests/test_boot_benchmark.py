"""What benchmarks/boot.py computes. The boots themselves take minutes and are not run here."""

from __future__ import annotations

from boot import interval, pairs


def test_the_interval_holds_the_mean_with_90_percent_by_students_t():
    shown = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2)  # 4.5 ± 1.895 · 2.449 / √8
    assert shown.startswith("mean 4.50, 90 % interval 2.86 to 6.14, median 4.50, n = 8 (1.00, 2.00,")
    assert interval([0.5], 2) == "0.50, n = 1"


def test_a_boot_without_its_counterpart_is_no_pair():
    ours, theirs = ([{"round": number, "value": number * scale} for number in (1, 2, 3)] for scale in (1.0, 10.0))
    assert pairs(ours, theirs[1:], lambda boot: boot["value"]) == [(2.0, 20.0), (3.0, 30.0)]
