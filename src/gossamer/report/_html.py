"""HTML by small functions: whatever is not made here is escaped."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

__all__ = [
    "Html",
    "Node",
    "document",
    "each",
    "join",
    "link",
    "packaged",
    "scroll",
    "section",
    "tag",
]

# Nothing is loaded and nothing runs, whatever the numbers' file names and texts hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_VOID = ("br", "meta", "link")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Node = str | None


def join(*nodes: Node) -> Html:
    """Put nodes after each other; `None` is nothing, plain text is escaped."""
    return Html(
        "".join(
            node if isinstance(node, Html) else escape(node, quote=False) for node in nodes if node
        )
    )


def tag(name: str, /, *nodes: Node, **attributes: str | None) -> Html:
    """Make an element; `class_` means `class`, `_` means `-`, `None` leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{join(*nodes)}</{name}>")


def each(name: str, /, texts: list[str] | tuple[str, ...], **attributes: str | None) -> Html:
    """Make one element per text."""
    return join(*(tag(name, text, **attributes) for text in texts))


def link(text: str, target: str) -> Html:
    """Make a link to a file beside the page."""
    return tag("a", text, href=target)


def section(name: str, heading: str, *nodes: Node) -> Html:
    """Make a section of the page under a heading."""
    head = tag("h2", heading, id=name)
    return join(tag("section", head, *nodes, aria_labelledby=name), Html("\n"))


def scroll(label: str, *nodes: Node) -> Html:
    """Make a box that scrolls sideways by itself, by keyboard too, when its content is wide."""
    return tag("div", *nodes, class_="scroll", role="region", aria_label=label, tabindex="0")


def packaged(name: str) -> str:
    """Return the text of a style sheet or script that is installed with the package."""
    return files("gossamer.report").joinpath(name).read_text(encoding="utf-8")


def document(title: str, *nodes: Node, style: str = "", script: str = "") -> str:
    """Make the whole file around the content; a script runs only as it is given here."""
    policy = _POLICY
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(packaged("_style.css") + style)),
    )
    body = tag("body", tag("main", *nodes), tag("script", Html(script)) if script else None)
    return f"<!DOCTYPE html>\n{tag('html', head, Html(chr(10)), body, lang='en')}\n"
