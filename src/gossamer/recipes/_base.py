"""What a recipe is: claims, arms, scales, and a function that measures; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gossamer.checks import check_choice, check_keys
from gossamer.errors import ConfigError
from gossamer.train.logging import Logger

__all__ = ["Arm", "Claim", "Column", "Figure", "Outcome", "Recipe", "build_config"]

STATISTICS = ("median", "mean", "min", "max")
SCALES = ("small", "medium", "paper")


@dataclass(frozen=True)
class Claim:
    """One checkable sentence; its bar and rule are fixed before the run for the record.

    Args:
        text: The sentence, with its numbers.
        metric: Name of a scalar of `Outcome`.
        unit: Of the metric.
        ours: The arm it is about.
        baselines: Arms to compare with, for rule `"paired"`.
        better: Which direction is better.
        rule: `"paired"`: 95 % t-interval of the paired difference to the best baseline lies above
            `bar`. `"bar"`: the statistic over seeds clears `bar`. `"seeds"`: at least `needed`
            seeds clear `bar`.
        bar: The value to clear.
        statistic: Over seeds: `"median"`, `"mean"`, `"min"`, `"max"`. Default `"median"`.
        needed: Seeds that must clear the bar, for rule `"seeds"`.
        paper: Values as the paper prints them, by label; empty if none is comparable.
        scales: Scales that are large enough to judge it. Default all.

    Raises:
        ConfigError: If the rule lacks what it needs.
    """

    text: str
    metric: str
    unit: str
    ours: str
    better: Literal["higher", "lower"]
    rule: Literal["paired", "bar", "seeds"]
    bar: float
    baselines: tuple[str, ...] = ()
    statistic: str = "median"
    needed: int | None = None
    paper: Mapping[str, float] = field(default_factory=dict)
    scales: tuple[str, ...] = SCALES

    def __post_init__(self) -> None:
        check_choice(self.better, ("higher", "lower"), "better")
        check_choice(self.rule, ("paired", "bar", "seeds"), "rule")
        check_choice(self.statistic, STATISTICS, "statistic")
        if self.rule == "paired" and not self.baselines:
            raise ConfigError(
                f"a paired claim needs baselines; got none in {self.text!r}. Name some."
            )
        if self.rule == "seeds" and not self.needed:
            raise ConfigError(f"rule 'seeds' needs `needed`; got none in {self.text!r}. Set it.")


@dataclass(frozen=True)
class Arm:
    """One method that a recipe runs.

    Args:
        name: Short name.
        title: What a reader calls it.
        role: `"ours"` or `"baseline"`.
        max_seeds: Most seeds it runs, for slow baselines; the table says so. Default no limit.
        cost: Time of one seed against the other arms; the dearest start first, so that several at
            a time end together. Default 1.
        scales: Scales that run it. Default all.
    """

    name: str
    title: str
    role: Literal["ours", "baseline"]
    max_seeds: int | None = None
    cost: float = 1.0
    scales: tuple[str, ...] = SCALES


@dataclass(frozen=True)
class Column:
    """One column of the table: a scalar of `Outcome`.

    Args:
        name: Name of the scalar.
        label: Column head.
        unit: Of the scalar.
        in_domain: Measured where the model was trained; always shown.
        fit: In-domain value below which the table says "did not fit the trained range".
        paper: Values the paper prints, by arm.
    """

    name: str
    label: str
    unit: str
    in_domain: bool = False
    fit: float | None = None
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure over the rows of `Outcome`; the report draws it.

    Args:
        kind: `"curve"`, `"heatmap"` or `"bars"`.
        name: File stem.
        title: Above the figure.
        alt: What it shows, in words, for those who cannot see it.
        x: Column of the horizontal axis.
        y: Column of the vertical axis.
        options: What else `plot_curves`, `plot_heatmap`, `plot_bars` take: `group`, `value`,
            `where` (column -> value, a filter), `shade`, `box`, `x_label`, `y_label`, `log_x`,
            `log_y`, `paper`. The text `"config.NAME"` stands for a value of the configuration.
    """

    kind: Literal["curve", "heatmap", "bars"]
    name: str
    title: str
    alt: str
    x: str
    y: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What one arm with one seed gives.

    Args:
        scalars: Numbers for claims and table, by name.
        rows: Detail rows for the figures; the runner adds `arm` and `seed`.
        variants: The same scalars under another condition, by its name; each is a table row.
    """

    scalars: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    variants: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A claim that can be checked on the reader's machine.

    Args:
        name: Kebab-case name; of its doc page too.
        method: Name of the `MethodInfo` with paper and deviations; `""` for a recipe of your own.
        title: One line.
        what: Two or three sentences for a reader who sees the page first.
        claims: What is checked.
        arms: What is run, in the order of the table.
        scales: A frozen dataclass for each of `"small"`, `"medium"`, `"paper"` that exists.
        run: `run(config, arm, seed, log) -> Outcome`; draws nothing and writes no file.
        columns: Of the table.
        figures: Drawn from the rows.
        budget: Expected wall time on two cores, by scale. Unit: minutes.
        fits_ci: Run in continuous integration.
        seeds: How many seeds a scale has unless the user says so. Default 3 for each.

    Raises:
        ConfigError: If a claim names an unknown arm or metric, or a scale has no budget.
    """

    name: str
    method: str
    title: str
    what: str
    claims: tuple[Claim, ...]
    arms: tuple[Arm, ...]
    scales: Mapping[str, Any]
    run: Callable[[Any, str, int, Logger], Outcome]
    columns: tuple[Column, ...]
    figures: tuple[Figure, ...]
    budget: Mapping[str, float]
    fits_ci: bool = False
    seeds: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arms = [arm.name for arm in self.arms]
        for claim in self.claims:
            for arm in (claim.ours, *claim.baselines):
                check_choice(arm, arms, f"arm in a claim of {self.name}")
            check_choice(
                claim.metric, [c.name for c in self.columns], f"metric in a claim of {self.name}"
            )
        for scale, config in self.scales.items():
            if not dataclasses.is_dataclass(config) or isinstance(config, type):
                raise ConfigError(
                    f"scales of {self.name} must hold instances of a frozen dataclass; "
                    f"got {config!r} for {scale!r}. Define a dataclass with the settings."
                )
            check_choice(scale, SCALES, "scale")
            check_choice(scale, self.budget, f"scale with a budget in {self.name}")

    def at(self, scale: str) -> Recipe:
        """Return the recipe with what one scale runs and judges.

        Raises:
            ConfigError: If a claim of that scale names an arm that it does not run.
        """
        return dataclasses.replace(
            self,
            arms=tuple(arm for arm in self.arms if scale in arm.scales),
            claims=tuple(claim for claim in self.claims if scale in claim.scales),
        )


def build_config(base: Any, values: Mapping[str, Any], name: str) -> Any:
    """Return a copy of a configuration dataclass with some values replaced.

    Args:
        base: A dataclass instance.
        values: Plain values by field name; lists become tuples, integers floats where those stand.
        name: Where they come from, for messages.

    Raises:
        ConfigError: If a key is unknown or a value has another type than the default.

    Example:
        >>> build_config(Arm("a", "A", "ours"), {"title": "B"}, "example").title
        'B'
    """
    check_keys(values, [f.name for f in dataclasses.fields(base)], name)
    changes = {}
    for key, value in values.items():
        old = getattr(base, key)
        if isinstance(old, tuple) and isinstance(value, list):
            value = tuple(value)
        if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if old is not None and type(value) is not type(old):
            raise ConfigError(
                f"{key} in {name} must be of type {type(old).__name__}, such as {old!r}; got "
                f"{value!r}. "
                "Change it."
            )
        changes[key] = value
    return dataclasses.replace(base, **changes)
