"""The HTML report: one file that contains everything and loads nothing from the network.

`html_page` is the whole page, with pictures from `tpbench.report.plots`; `page_tables` makes the tables of a section.
Jinja renders both by the templates of this folder. It escapes all text that a template does not mark as safe.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from tpbench import packages
from tpbench.report.plots.style import DARK, LIGHT
from tpbench.settings import JobError

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, **context: Any) -> str:
    """Return the page of a template. Its policy permits no script but the page's own, and no access to the network."""
    environment = _environment()
    folder = resources.files(__name__)
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        css=(folder / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=f"sha256-{digest}",
        light=LIGHT,
        dark=DARK,
        **context,
    )


@functools.cache
def _environment() -> Environment:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise JobError(f"the HTML report needs jinja2: {packages.pip_install('jinja2')}") from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("tpbench.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
