"""The README tells the truth about what can be checked: its options and its links."""

import dataclasses
import re
from pathlib import Path

from jaxserve.config import EngineConfig, ServerConfig, layers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_option_tables_list_exactly_the_options() -> None:
    classes = [EngineConfig, *layers(EngineConfig).values(), ServerConfig]
    fields = [f for cls in classes for f in dataclasses.fields(cls) if f.name not in layers(EngineConfig)]
    helps = {
        "--" + f.name.replace("_", "-"): f.metadata["help"] for f in fields if not f.metadata.get("positional") and "help" in f.metadata
    }
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*) \|$", README, re.MULTILINE)
    assert sorted(option for option, _ in rows) == sorted(helps)
    for option, text in rows:
        assert text.removesuffix(")").split(" (default: ")[0] == helps[option], option


def test_links_point_at_files() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
