"""Words of a text, for the lexical first stage."""

from __future__ import annotations

import re

__all__ = ["STOP_WORDS", "words_of"]

# the English list of the Snowball stemmers, its contractions split as those of a text are
_ENGLISH = """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she
    her hers herself it its itself they them their theirs themselves what which who whom this that
    these those am is are was were be been being have has had having do does did doing would should
    could ought will m re s ve d ll isn t aren wasn weren hasn haven hadn doesn don didn won wouldn
    shan shouldn can cannot couldn mustn let a an the and but if or because as until while of at by
    for with about against between into through during before after above below to from up down in
    out on off over under again further then once here there when where why how all any both each
    few more most other some such no nor not only own same so than too very
"""
STOP_WORDS = frozenset(_ENGLISH.split())
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text: runs of letters and digits in lower case, without stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]
