# ruff: noqa: T201
"""Write `docs/refusals.md` from the mutation matrix: `python scripts/write_refusals.py`. `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.matrix.page import write_page  # noqa: E402 - from a script the tests have to be found first

PAGE = ROOT / "docs" / "refusals.md"


def main() -> None:
    text = write_page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: {len(text.splitlines())} lines")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/write_refusals.py")


if __name__ == "__main__":
    main()
