"""What MkDocs calls as it builds the site (mkdocs.yml).

Pages of `docs` link to files beside it: `../../SECURITY.md`, `../examples/train.py`. GitHub shows
these; here each such file becomes a page of the site, and the link leads there. Mermaid comes from
the site itself, on the pages that draw with it: `make docs` has put it into build/mermaid.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
MERMAID = ROOT / "build" / "mermaid" / "mermaid.min.js"
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
# The theme colours `#arrowhead`; Mermaid writes the number of the drawing before it.
ARROWS = """
{
  const initialize = mermaid.initialize;
  const arrows = '[id$="-arrowhead"] path{fill:var(--md-mermaid-sequence-message-line-color)}';
  mermaid.initialize = (one) => initialize({ ...one, themeCSS: `${one.themeCSS || ""}${arrows}` });
}
"""
FENCES = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".toml": "toml"}


def page_of(path: str) -> str:
    """Returns where a file of the repository lies in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"project/{path}" if path.endswith(".md") else f"project/{path}.md"


def path_of(page: str) -> str:
    """Returns the file of the repository that a page of the site's sources is made of."""
    return _sources.get(page, f"docs/{page}")


_sources: dict[str, str] = {}  # page of the site -> the file that it shows


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file that a page links to, and for those that these link to."""
    _sources.clear()
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += [path.name for path in ROOT.glob("*.md")]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue  # --strict says what is not there
        seen.add(path)
        text = (ROOT / path).read_text()
        if not path.startswith("docs/"):
            _sources[page_of(path)] = path
            content = text if path.endswith(".md") else code_page(path, text)
            added = File.generated(config, page_of(path), content=content)
            added.inclusion = InclusionLevel.NOT_IN_NAV  # or where mkdocs.yml has it
            files.append(added)
        if path.endswith(".md"):
            waiting += [target_of(path, link[1]) for link in links_of(text)]
    return files


def code_page(path: str, text: str) -> str:
    """Returns a page that shows a file of code."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n`{path}` of the repository.\n\n````{language}\n{text}\n````\n"


def links_of(text: str) -> list[tuple[str, ...]]:
    return [found[:2] for found in LINK.findall(FENCES.sub("", text))]


def target_of(path: str, link: str) -> str:
    """Returns the file of the repository that a link of a file names."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return posixpath.join(target, "README.md") if (ROOT / target).is_dir() else target


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Makes links between files of the repository links between pages of the site."""
    here = page.file.src_uri
    path = path_of(here)

    def moved(found: re.Match[str]) -> str:
        target = target_of(path, found[2])
        if not (ROOT / target).is_file():
            return found[0]
        link = posixpath.relpath(page_of(target), posixpath.dirname(here) or ".")
        return f"{found[1]}{link}{found[3] or ''}{found[4]}"

    kept, at = [], 0
    for fence in FENCES.finditer(markdown):
        kept += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*kept, LINK.sub(moved, markdown[at:])])


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Adds Mermaid to a page that has a diagram: the theme takes it from there."""
    if 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath("assets/mermaid.min.js", page.url or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Copies Mermaid to the site. Raises FileNotFoundError: `make docs` has not fetched it."""
    script = MERMAID.read_text(encoding="utf-8") + ARROWS
    (Path(config.site_dir) / "assets" / "mermaid.min.js").write_text(script, encoding="utf-8")
