"""The page at `/`: a chat that shows which tokens were drafted. It is one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.responses import HTMLResponse

from cli.page import with_drawings

HERE = Path(__file__).parent
# The page may run its own script and style, which it names by their hashes, and talk to its own server. That is all.
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src '{script}'; style-src '{style}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def chat_page() -> HTMLResponse:
    """The page with its headers. The same answer serves every request."""
    style, script = (with_drawings((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    page = (HERE / "page.html").read_text(encoding="utf-8").replace("%page.css%", style).replace("%page.js%", script)
    headers = {
        "Content-Security-Policy": POLICY.format(script=_hash(script), style=_hash(style)),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


def _hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style that stands in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
