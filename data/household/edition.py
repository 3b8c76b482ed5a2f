"""Which edition of the household engine the driver reproduces, and whether the installed one is the same.

The domain and grammar files of the wheel are found without importing the package (importing it creates folders in the
home directory).
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from schemas.errors import EnvironmentFault

ALFWORLD_VERSION = "0.4.2"
DOMAIN_SHA256 = "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280"
GRAMMAR_SHA256 = "c5b22f0f73309a7fd7c8e5b71de42ad4803b60766ab4a51cc2feb34162be036b"


def engine_version(driver: str, revision: int) -> str:
    """The version string of an environment: engine, domain and grammar hashes, driver.

    >>> engine_version("fast", 1)
    'alfworld-0.4.2/domain-f1473041ed01/grammar-c5b22f0f7330/fast-1'
    """
    domain, grammar = (DOMAIN_SHA256, GRAMMAR_SHA256) if driver == "fast" else installed_hashes()
    return f"alfworld-{ALFWORLD_VERSION}/domain-{domain[:12]}/grammar-{grammar[:12]}/{driver}-{revision}"


@cache
def installed_files() -> tuple[str, str]:
    """The text of the installed wheel's domain and grammar. Raises EnvironmentFault when the wheel is not there."""
    spec = find_spec("alfworld")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        domain, grammar = Path(folder, "data", "alfred.pddl"), Path(folder, "data", "alfred.twl2")
        if domain.is_file() and grammar.is_file():
            return domain.read_text(encoding="utf-8"), grammar.read_text(encoding="utf-8")
    raise EnvironmentFault(
        "the household engine's domain and grammar are not installed",
        expected="alfworld with data/alfred.pddl and data/alfred.twl2",
        found=folders or "no package alfworld",
        remedy=f"pip install alfworld=={ALFWORLD_VERSION}",
    )


@cache
def installed_hashes() -> tuple[str, str]:
    """sha256 of the installed domain and grammar."""
    domain, grammar = installed_files()
    return hashlib.sha256(domain.encode()).hexdigest(), hashlib.sha256(grammar.encode()).hexdigest()


def check_edition() -> None:
    """Raise EnvironmentFault unless the installed engine is the edition that the fast driver reproduces."""
    domain, grammar = installed_hashes()
    if (domain, grammar) != (DOMAIN_SHA256, GRAMMAR_SHA256):
        raise EnvironmentFault(
            "the installed household engine is another edition than the fast driver reproduces",
            expected=f"domain {DOMAIN_SHA256} and grammar {GRAMMAR_SHA256}",
            found=f"domain {domain} and grammar {grammar}",
            remedy=f'pin alfworld=={ALFWORLD_VERSION} or set env.options.driver = "stock"',
        )
