"""`python -m tests.deploy.bill FILE`: what servekit is made of, as a CycloneDX bill of materials.

Of this environment, in the versions that deploy/constraints.txt pins, cut to what servekit needs to
run: what only tests need is left out. Then the licences are told.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"


def bill(into: Path) -> dict[str, Any]:
    """Write the bill to `into` and return it."""
    made = Bom()
    made.metadata.component = root = _component("servekit", ComponentType.APPLICATION)
    names = closure("servekit")
    components = {name: _component(name) for name in sorted(names)}
    made.components.update(components.values())
    for name, one in {**components, "servekit": root}.items():
        needs = [components[other] for other in closure(name, deep=False) if other in components]
        made.register_dependency(one, needs)
    into.write_text(JsonV1Dot6(made).output_as_string(indent=1))
    told: dict[str, Any] = json.loads(into.read_text())
    return told


def _component(name: str, kind: ComponentType = ComponentType.LIBRARY) -> Component:
    about, version = metadata.metadata(name), metadata.version(name)
    licence = _stated(about) or _read_title(name)
    made = [LicenseFactory().make_from_string(licence)] if licence else []
    purl = PackageURL("pypi", None, name, version)
    ref = f"{name}=={version}"
    return Component(name=name, version=version, type=kind, bom_ref=ref, purl=purl, licenses=made)


def _stated(about: Any) -> str:
    """An expression, or what the classifiers say, or the first line of the text."""
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [one.split(" :: ")[-1] for one in about.get_all("Classifier", ())
                   if one.startswith("License :: OSI Approved ::")]  # fmt: skip
    if classifiers:
        return " / ".join(classifiers)
    return str(about.get("License") or "").strip().partition("\n")[0]


def _read_title(name: str) -> str:
    """Return the first line of the licence file, for wheels that have nothing else."""
    files = metadata.files(name) or ()
    texts = [str(one.read_text()) for one in files if one.name.startswith(("LICENSE", "LICENCE"))]
    return texts[0].strip().partition("\n")[0] if texts else ""


def closure(name: str, *, deep: bool = True) -> set[str]:
    """What a distribution needs to run here, by canonical name; if `deep`, all that needs, too."""
    found: set[str] = set()
    todo: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set()
    while todo:
        seen.add(one := todo.pop())
        for text in metadata.requires(one[0]) or ():
            needs = Requirement(text)
            wanted = needs.marker is None or any(
                needs.marker.evaluate({"extra": extra}) for extra in ("", *one[1])
            )
            following = canonicalize_name(needs.name), frozenset(needs.extras)
            if wanted and following not in seen:
                found.add(following[0])
                todo += [following] if deep else []
    return found


def licences(made: dict[str, Any]) -> Counter[str]:
    """How many components have which licence; of several, as they are told."""
    return Counter(licence_of(one) for one in made["components"])


def licence_of(component: dict[str, Any]) -> str:
    told = component.get("licenses", [])
    names = [one.get("expression") or _named(one["license"]) for one in told]
    return " / ".join(dict.fromkeys(name for name in names if name)) or "not told"


def _named(licence: dict[str, Any]) -> str:
    return str(licence.get("id") or licence.get("name", "")).partition("\n")[0]


def pinned() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line]
    return {
        canonicalize_name(name): version for name, version in (one.split("==") for one in lines)
    }


if __name__ == "__main__":
    made = bill(Path(sys.argv[1]))
    print(f"{len(made['components'])} components")
    for name, count in licences(made).most_common():
        print(f"{count:4}  {name}")
