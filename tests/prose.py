"""Checks the length of README.md, CONTRIBUTING.md and docs/, of their sentences, and their numbers.

python tests/prose.py    # each page that is over a limit; with -v what every page has
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/[!_abn]*/*.md"))]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # api, benchmarks, notebooks: made
FIGURE = r"(?<![\w.-])[+±~-]?\d[\d,]*(\.\d+)?(?![\w-])(?!\.\d)"  # not bfloat16, 7B, GPT-2, v5e:4x4
UNITS = r"(%|[KMGT]i?B|ms|s|seconds|minutes|nats|times)(?!\w)"
MEASURED = rf"{FIGURE}\s?{UNITS}|(?<![\w.-])\d+\.\d+(?!\.\d)"


def prose(text):
    """A page without code, tables, directives, pictures, the targets of links, and headings."""
    text = re.sub(r"^(```|:::).*?^\1.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#|!\[|:::|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`]*`", "`code`", text, flags=re.DOTALL)


def sentences(text):
    """Those of paragraphs, and of items of lists."""
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose(text))
    found = [s for part in parts for s in re.split(r"(?<=[.!?:])[)*\"]*\s+(?=\W*[A-Z0-9`])", part)]
    return [s.split() for s in found if len(s.split()) > 1]


def over(page):
    """What of a page is over its limit, and its figures."""
    text = page.read_text()
    found = sentences(text)
    words = sum(map(len, found))
    mean = words / max(len(found), 1)
    numbers = len(re.findall(FIGURE, prose(text)))
    name = page.relative_to(ROOT)
    yes = {
        f"{words} words of prose, of at most 1,200": words > 1200,
        f"a mean sentence of {mean:.1f} words, of at most 18": mean > 18,
        f"{numbers} numbers, of at most 40": name.stem == "choosing" and numbers > 40,
    }
    for sentence in found:
        joined = " ".join(sentence)
        yes[f"{len(sentence)} words, of at most 30: {joined[:70]}"] = len(sentence) > 30
        several = [m[0] for m in re.finditer(MEASURED, joined)]
        yes[f"{len(several)} figures, of at most 1: {joined[:70]}"] = len(several) > 1
    return name, [what for what, is_over in yes.items() if is_over], words, mean


def main():
    """Prints what is over; the exit code is 1 then."""
    failed = []
    for page in [ROOT / "README.md", *PAGES]:
        name, wrong, words, mean = over(page)
        failed += [f"{name}: {what}" for what in wrong]
        if "-v" in sys.argv:
            print(f"{words:6} {mean:5.1f} {name}")
    count = {p: len(re.findall(r"\S*\w\S*", p.read_text())) for p in [ROOT / "README.md", *PAGES]}
    total, readme = sum(count.values()), count[ROOT / "README.md"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    contributing = re.sub(r"^```.*?^```$", "", contributing, flags=re.MULTILINE | re.DOTALL)
    own = len(re.sub(r"^\|.*$", "", contributing, flags=re.MULTILINE).split())
    for name, words, limit in (
        ("README.md", readme, 700),
        ("docs/", total - readme, 22_000),
        ("CONTRIBUTING.md without its tables and drawings", own, 900),
    ):
        failed += [f"{name}: {words} words, of at most {limit}"] * (words > limit)
        if "-v" in sys.argv:
            print(f"{words:6} words in {name}")
    print(*failed, sep="\n", end="\n" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
