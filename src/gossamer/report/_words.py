"""The sentences of a page: what was found, what a claim compares, how to read the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._numbers import DASH, as_given, decimals, duration, show, signed
from ._run import Claim, Run, Side

__all__ = ["SYMBOLS", "ClaimView", "about", "found", "how_to_read", "view_claim"]

SYMBOLS = {"held": "✓", "not held": "✗", "undecided": "?"}

_HERE = (
    (
        "Here and paper",
        "“Here” was measured by this run. “Paper” is printed in the paper and was not measured "
        "here; its setting may be larger.",
    ),
    (
        "Value and spread",
        "1.00 (0.99–1.00) is the median over the seeds, with the lowest and the highest seed in "
        "brackets where they differ.",
    ),
)
_TRAINED = (
    (
        "Trained",
        "A column marked (trained) lies inside the range the models were trained on; the others "
        "lie outside of it.",
    ),
)

_READING_CLAIMS = (
    (
        "Difference",
        "Ours minus the comparison, or the other way round where lower is better: positive always "
        "means that ours is better. The 95 % interval says how far the mean difference may lie "
        "from the one measured, given how much the seeds vary.",
    ),
    (
        "Rule “paired”",
        "Ours and the baseline are compared seed by seed. Held: the whole interval of the "
        "difference lies above the smallest difference that counts. Not held: all of it lies "
        "below. Undecided: it contains that value.",
    ),
    (
        "Rule “bar”",
        "The statistic over the seeds reaches a value fixed before the run, or it does not. The "
        "interval is shown but does not decide.",
    ),
    ("Rule “seeds”", "Enough of the single seeds reach a value fixed before the run."),
    (
        "Undecided",
        "The seeds do not settle it: they differ too much, or there was only one. More seeds may.",
    ),
    ("Verdict of the run", "The verdict at the top is that of the worst claim."),
)


@dataclass(frozen=True)
class ClaimView:
    """One claim in words, the same for HTML and Markdown."""

    text: str
    verdict: str
    here: str
    here_note: str
    against: str
    against_name: str
    against_note: str
    difference: str
    difference_note: str
    paper: tuple[str, ...]

    def against_words(self) -> str:
        """What the claim compares with, in one line."""
        return "; ".join(filter(None, (self.against_name, self.against_note)))


def found(claims: Sequence[Claim]) -> str:
    """Say in one sentence what was found."""
    if not claims:
        return "No claim was made."
    count = {verdict: sum(c.verdict == verdict for c in claims) for verdict in SYMBOLS}
    if len(claims) == 1:
        only = {"held": "held", "not held": "did not hold", "undecided": "is undecided"}
        return f"The one claim {only[claims[0].verdict]}."
    if count["held"] == len(claims):
        return f"All {len(claims)} claims held."
    parts = [f"{count['held'] or 'None'} of {len(claims)} claims held"]
    parts += [f"{count['not held']} did not"] if count["not held"] else []
    be = "is" if count["undecided"] == 1 else "are"
    parts += [f"{count['undecided']} {be} undecided"] if count["undecided"] else []
    return "; ".join(parts) + "."


def how_to_read(run: Run) -> tuple[tuple[str, str], ...]:
    """The terms that a page uses, explained: those of recipes, and those the page declares."""
    own = tuple((one.term, one.text) for one in run.page.terms)
    marked = any(column.in_domain for column in run.page.columns)
    if not run.is_recipe:  # nothing of a paper, no seeds, no methods to compare
        return (_TRAINED if marked else ()) + own
    return _HERE + _TRAINED + (_READING_CLAIMS if run.summary.claims else ()) + own


def about(run: Run) -> list[str]:
    """The setting of a run in a few words each."""
    summary = run.summary
    seeds = ", ".join(str(seed) for seed in summary.seeds)
    facts = [
        f"Recipe {summary.recipe}" if summary.recipe else f"Command {summary.command}",
        summary.scale and f"scale {summary.scale}",
        seeds and (f"seeds {seeds}" if len(summary.seeds) > 1 else f"one seed ({seeds})"),
        "" if summary.seconds is None else f"{duration(summary.seconds)} in all",
        summary.version and f"gossamer {summary.version}",
    ]
    return [fact for fact in facts if fact]


def _seeds(side: Side, places: int | None) -> str:
    values = ", ".join(show(v, places) for v in side.values)
    if not values:
        return side.statistic
    if len(side.values) == 1:
        return f"one seed: {values}"
    return f"{side.statistic or 'value'} of {len(side.values)} seeds: {values}"


def _bar(claim: Claim) -> float | None:
    return claim.baseline.value if claim.baseline.name == "bar" else claim.bar


def _places(claim: Claim) -> int | None:
    """Decimals for a claim: enough that a value below its bar never reads like the bar."""
    ours = [v for v in (claim.ours.value, *claim.ours.values) if v is not None]
    others = (claim.baseline.value, *claim.baseline.values)
    places, bar = decimals([*ours, *others, claim.difference, *claim.interval]), _bar(claim)
    if places is None or bar is None or claim.rule == "paired":
        return places
    near = [v for v in ours if v != bar]
    while places < 6 and any(round(v, places) == round(bar, places) for v in near):
        places += 1
    return places


def _reached(claim: Claim, bar: float) -> int:
    values = [v for v in claim.ours.values if v is not None]
    return sum(v >= bar if claim.better == "higher" else v <= bar for v in values)


def _against(claim: Claim, run: Run, places: int | None) -> tuple[str, str, str]:
    bar = _bar(claim)
    reach = f"{'≥' if claim.better == 'higher' else '≤'} {as_given(bar)}"
    if claim.rule == "seeds" and bar is not None:
        count = f"{_reached(claim, bar)} of {len(claim.ours.values)} seeds reach it"
        count += f", {claim.needed:g} are needed" if claim.needed is not None else ""
        return reach, "bar for each seed", count
    if claim.baseline.name == "bar":
        return reach, "bar, fixed before the run", ""
    notes = [_seeds(claim.baseline, places)]
    if claim.bar is not None and claim.rule == "paired":
        notes.append(f"ours must be better by more than {as_given(claim.bar)}")
    elif claim.bar is not None:
        notes.append(f"bar {reach}")
    value, name = show(claim.baseline.value, places), run.arm_title(claim.baseline.name)
    return value, name, "; ".join(filter(None, notes))


def _interval(claim: Claim, places: int | None) -> str:
    low, high = claim.interval
    if low is None or high is None:
        return "no interval" if claim.difference is not None else ""
    return f"95\u00a0% interval {signed(low, places)} to {signed(high, places)}"


def view_claim(claim: Claim, run: Run) -> ClaimView:
    """Put a claim into words."""
    places = _places(claim)
    against, name, note = _against(claim, run, places)
    unit = f" {claim.unit}" if claim.unit and claim.ours.value is not None else ""
    notes = filter(None, (run.arm_title(claim.ours.name), _seeds(claim.ours, places)))
    return ClaimView(
        text=claim.text,
        verdict=claim.verdict,
        here=show(claim.ours.value, places) + unit,
        here_note="; ".join(notes),
        against=against,
        against_name=name,
        against_note=note,
        difference=signed(claim.difference, places) if claim.difference is not None else DASH,
        difference_note=_interval(claim, places),
        paper=tuple(f"{label}: {as_given(value)}" for label, value in claim.paper.items()),
    )
