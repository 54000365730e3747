"""Elements of HTML and SVG. Text and attributes are escaped where they are written out."""

from __future__ import annotations

from xml.etree.ElementTree import Element, indent, tostring

from compile_cache.cli.terminal import printable

SVG = "http://www.w3.org/2000/svg"


def tag(name: str, *children: Element | str | None, **attributes: str | float | None) -> Element:
    """The element `name`. A trailing `_` of an attribute's name is dropped, another `_` becomes `-`; attributes and
    children that are None are left out. Characters that do not print are written out as Python writes them."""
    element = Element(name)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_").replace("_", "-"), _number(value) if isinstance(value, float) else str(value))
    for child in children:
        append(element, child)
    return element


def append(element: Element, child: Element | str | None) -> None:
    """Add a child at the end."""
    if isinstance(child, Element):
        element.append(child)
    elif child is not None and len(element):
        element[-1].tail = (element[-1].tail or "") + printable(child)
    elif child is not None:
        element.text = (element.text or "") + printable(child)


def style(css: str) -> Element:
    """An element `style`. The sheet is written as it is."""
    element = Element("style")
    element.text = css
    return element


def html_text(root: Element) -> str:
    """The document as HTML."""
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def svg_text(root: Element) -> str:
    """The picture as a file of its own."""
    root.set("xmlns", SVG)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _number(value: float) -> str:
    """Tenths of a pixel are enough."""
    return f"{value:.1f}".removesuffix(".0")
