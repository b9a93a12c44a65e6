"""Samples taken side by side, and the figures made of them: medians, ratios of medians, spreads."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

MB = 1_000_000
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Unavailable(Exception):
    """Something cannot be measured here; the text is the reason, which stands in the row instead of a figure."""


@dataclass(frozen=True)
class Series:
    """The samples of one thing, one a repeat, in the order in which they were taken.

    Attributes:
        name: what was measured.
        unit: of the values: ``s``, ``MB/s``, ``bytes``, ``1``.
        values: every sample; never empty.
    """

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def per_second(self, count: float, *, unit: str = "MB/s", scale: float = MB) -> Series:
        """A throughput of these seconds: ``count`` / ``scale`` things in each sample's time."""
        return Series(self.name, unit, tuple(count / scale / value for value in self.values))


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and the smallest and the largest ratio within one repeat."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, measured: Series, peer: Series) -> Ratio:
        """``measured`` over ``peer``: samples of one repeat, taken after one another, belong together."""
        pairs = [one / other for one, other in zip(measured.values, peer.values, strict=False)]
        return cls(measured.median / peer.median, min(pairs), max(pairs))


@dataclass(frozen=True)
class Target:
    """What a figure is to reach: at most, or at least, a bound."""

    relation: Literal["<=", ">="]
    bound: float

    def reached(self, figure: float) -> bool:
        return figure <= self.bound if self.relation == "<=" else figure >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.relation == '<=' else 'at least'} {self.bound:g}"


@dataclass(frozen=True)
class Samples(Generic[T]):
    """What :func:`alternate` gave.

    Attributes:
        by_arm: every arm's samples.
        missing: why an arm has none.
    """

    by_arm: Mapping[str, Sequence[T]]
    missing: Mapping[str, str]

    def of(self, arm: str) -> Sequence[T]:
        """An arm's samples.

        Raises:
            Unavailable: it has none.
        """
        if arm in self.missing:
            raise Unavailable(self.missing[arm])
        return self.by_arm[arm]

    def series(self, arm: str, value: Callable[[T], float], *, unit: str = "s", name: str | None = None) -> Series:
        """One number of each of an arm's samples.

        Raises:
            Unavailable: it has none.
        """
        return Series(name or arm, unit, tuple(value(sample) for sample in self.of(arm)))


def alternate(arms: Mapping[str, Callable[[], T]], *, repeats: int, warmups: int = 0) -> Samples[T]:
    """Take the arms' samples in turn, so that whatever else the machine does meets all of them alike.

    Each turn has an order of its own, the same in every run: what an arm leaves behind (blocks of the disk that have
    been written once are faster the second time) would otherwise always meet the same one.

    An arm that raises :class:`Unavailable` is left out from then on, with what it had.
    """
    by_arm: dict[str, list[T]] = {name: [] for name in arms}
    missing: dict[str, str] = {}
    turns = [(turn, name) for turn in range(-warmups, repeats) for name in _shuffled(arms, turn)]
    for turn, name in turns:
        if name in missing:
            continue
        try:
            sample = arms[name]()
        except Unavailable as reason:
            missing[name] = str(reason)
            continue
        if turn >= 0:
            by_arm[name].append(sample)
    return Samples(by_arm, missing)


def _shuffled(names: Iterable[str], turn: int) -> list[str]:
    order = list(names)
    random.Random(turn).shuffle(order)
    return order


def slowest(results: Iterable[Mapping[str, float]], key: str) -> float:
    """The largest value over the ranks."""
    return max(result[key] for result in results)


def parse_size(text: str) -> int:
    """``64MB``, ``1GB``, ``16MiB`` or a plain number, in bytes.

    Raises:
        ValueError: it is none of these.
    """
    number = text.strip().upper()
    unit = number.lstrip("0123456789.").strip()
    factor = _UNITS.get(unit or "B")
    digits = number[: len(number) - len(unit)].strip() if unit else number
    if factor is None or not digits:
        raise ValueError(f"{text!r} is no size; give e.g. 64MB, 1GB or 16MiB")
    size = int(float(digits) * factor)
    if size < 1:
        raise ValueError(f"{text!r} is no size: it must be at least one byte")
    return size


def format_size(count: float) -> str:
    """Bytes for a person: ``64 MB``, ``1 GB``."""
    for unit in ("GB", "MB", "KB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.3g} {unit}"
    return f"{count:.0f} B"


def flush_disks() -> None:
    """Write everything back that earlier samples have left in memory, so that the next one does not pay for it."""
    os.sync()
