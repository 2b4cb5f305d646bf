"""What mkdocs calls while it builds the site."""

import re


def on_page_content(html: str, **kwargs: object) -> str:
    """Options such as `--output` in the text stay in one line."""

    def spans(code: re.Match) -> str:
        return re.sub(r"(?<![\w-])--?\w[\w-]*", r"<span>\g<0></span>", code[0])

    return re.sub(r"<code>[^<]+</code>", spans, html)
