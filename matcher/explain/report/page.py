"""A page of one file: its own style, script and data inside, and a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def build_page(title: str, scripts: Sequence[str], body: str, data: dict[str, Any]) -> bytes:
    """The page, UTF-8.

    Args:
        title: plain text; it is escaped.
        scripts: names of files beside this one, run one after another; they read the data and fill the body.
        body: HTML, ours and not made of foreign names.
        data: ready for JSON; foreign names belong here, and the script shows them as text.
    """
    style, *parts = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", *scripts))
    code = "".join(parts)
    policy = (
        f"default-src 'none'; img-src data:; script-src {_allowed(code)}; style-src {_allowed(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    # No "<" of a name may end the element that holds the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{body}"
        f'<script type="application/json" id="data">{text}</script><script>{code}</script></html>'
    )
    return page.encode("utf-8", "replace")  # a name that is no Unicode


def _allowed(text: str) -> str:
    """The hash by which a policy allows an inline style or script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
