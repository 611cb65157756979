"""Share of lines per file with a phrase that makes technical English hard to read.

`python -m tests.docs.english` writes the shares to english.json.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

RECORD = Path(__file__).with_suffix(".json")
PHRASES = re.compile(
    "|".join(
        (
            r"^(What|Whether|Where|Who|Whose|How|Which|That) ",
            r"\bwhat (is|are|was|were|has|had|there|it|they|a|an|the|one|no|can|may|does|do|did|its|this)\b",
            r"\b(is|are|was|were|be|has|have|holds?|names?|knows?|takes?|makes?) (no|none)\b",
            r"\b(of|by|on|in|from|to|with|for|at|behind|below|beyond|over|under|after|within|without) (which|whom)\b",
            r"\b(of both|in both)\b|\bboth (agree|are|have|hold|make|that|grow|were)\b",
            r"\b(stands?|stood|standing|lies|lie|lay|lying)\b",
            r"\b(anew|aloud|thereby|hence|whoever|whatever|whichever|besides?|hardly|nor|once more|lest)\b",
            r"\b[Ww]here (it|they|there|that|this|those|one|an?|no|nothing|none|some|the|its|each|all|not|any)\b",
            r"\b(so many|so much|so large|so long|so far|as many|as much|so often)\b",
            r"\b(tells?|told|says?|said|speaks?|spoken|spells?|spelt)\b",
            r"\b(held against|told apart|taken for|put together|at hand|in place of|of its own|made of|comes? to)\b",
            r"\b([Nn]othing|[Nn]obody|none|None of|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
            r"\b([Tt]hat of|[Tt]hose (of|that|which|in)|[Tt]he one that|[Tt]he ones|[Oo]nes? that)\b",
            r"\b(texts|words|sentences?)\b",
            r"(^Of |; of |: of |\. Of )",
        )
    )
)


def lines_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
                yield from filter(None, map(str.strip, node.value.splitlines()))
        return
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        prose = line.lstrip("#-*|> ").strip()
        if prose and not fenced:
            yield prose


def shares() -> dict[str, float]:
    found = {}
    for path in sorted([*(ROOT / "mismatchctl").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]):
        lines = list(lines_of(path))
        if lines:
            found[path.relative_to(ROOT).as_posix()] = (
                100 * sum(bool(PHRASES.search(line)) for line in lines) / len(lines)
            )
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: round(share + 0.05, 1) for name, share in shares().items()}, indent=0) + "\n")
