"""Hooks of MkDocs: each package gets a page of the reference, pages outside of ``docs/`` a place in the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^]]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
_FACES = ("lit_fsdp", "lit_fsdp.callbacks", "lit_fsdp.tasks")  # whose public names are all that there is to know
_REFERENCE = """\
# {name}

::: {name}
    options:
      show_root_heading: false
      show_submodules: {shows_modules}
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference into the navigation."""
    assert config.nav is not None
    (entry,) = [entry for entry in config.nav if "Reference" in entry]
    entry["Reference"] = [{name: _locate_reference(name)} for name in _list_packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and the pages that others link to outside of ``docs/``, such as results of benchmarks."""
    for name in _list_packages():
        text = _REFERENCE.format(name=name, shows_modules=name not in _FACES)
        files.append(File.generated(config, _locate_reference(name), content=text))
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.abs_src_path]
    known = set(waiting)
    while waiting:
        source = waiting.pop()
        targets = {_resolve(source, match[2]) for match in _LINK.finditer((ROOT / source).read_text())}
        for target in sorted(targets - known):
            if target.endswith(".md"):
                known.add(target)
                waiting.append(target)
                files.append(File.generated(config, _place(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their pages lie in the site; of other files of the repository, keep the name."""
    del config
    here = page.file.src_uri
    inside = here.removeprefix("repository/")
    source = inside if inside != here else f"docs/{here}"

    def move(match: re.Match[str]) -> str:
        target = _resolve(source, match[2])
        if files.get_file_from_path(_place(target)) is None:
            return match[1] if "`" in match[1] else f"`{target}`" if match[1] in target else f"{match[1]} (`{target}`)"
        return f"[{match[1]}]({posixpath.relpath(_place(target), posixpath.dirname(here) or '.')}{match[3] or ''})"

    return markdown if here.startswith("reference/") else _LINK.sub(move, markdown)


def _list_packages() -> list[str]:
    packages = {f"lit_fsdp.{init.parent.name}" for init in (ROOT / "lit_fsdp").glob("*/__init__.py")}
    return [*_FACES, *sorted(packages - {*_FACES, "lit_fsdp.cli"})]  # commands have their --help


def _locate_reference(package: str) -> str:
    return f"reference/{package.rpartition('.')[2]}.md"


def _resolve(source: str, link: str) -> str:
    """Return the path in the repository of what a page of the repository links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(path: str) -> str:
    """Return the place in the site of a path in the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
