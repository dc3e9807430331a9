"""The pages of the lectures: an index (docs/lectures.md), one each (docs/lectures/), and a path (docs/learn/path.md).

`[path]` of lectures.toml has the order of the concepts of each lecture.  An entry stands on one page: that of its key
`lecture`, or of the first lecture that names it; so does a lab, under the first entry that quotes it.  Links in
lectures.toml are relative to docs/, or `#id` for an entry or a lab on any of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

Plain = dict[str, Any]
KINDS = {"concept": "Concepts", "example": "Worked examples", "correction": "Corrections", "exercise": "Exercises"}
NOTE = "<!-- Made by `make lectures` from lectures.toml and lectures.results.json. -->"
STALE = ", stale"
STALE_NOTE = "A result marked “stale” was recorded before a later change of the code that its lab imports.\n\n"
INDEX, PATH = "lectures.md", "learn/path.md"


def entries(data: Plain) -> Iterator[tuple[str, str, Plain]]:
    """(kind, id, entry) of all entries."""
    for kind in KINDS:
        for name, entry in data[kind].items():
            yield kind, name, entry


def mark(kind: str, name: str) -> str:
    """The anchor of an entry or a lab."""
    return f"{kind}-{name}".lower().replace(".", "-")


def checks_of(result: Plain) -> list[Plain]:
    """The criteria of a recorded lab, in the order of its statements."""
    return [check for clause in result["conclusion"] for check in clause["checks"]]


def verdict(result: Plain) -> str:
    """The word of a recorded lab, with the seeds it held in: `PASS (5/5 seeds), stale`."""
    seeds = f" ({result['held']}/{result['seeds']} seeds)" if result["seeds"] > 1 else ""
    return ("PASS" if result["passed"] else "FAIL") + seeds + (STALE if result.get("stale") else "")


def labs_of(entry: Plain) -> dict[str, list[str]]:
    """The labs that an entry quotes, each with the phrases that choose its criteria."""
    quoted: dict[str, list[str]] = {}
    for lab in entry.get("labs", []):
        name, _, phrases = lab.partition(": ")
        quoted.setdefault(name, []).extend(phrases.split("; ") if phrases else [])
    return quoted


def folded(title: str, text: str, anchor: str = "") -> str:
    """`text` behind a line that opens it; `markdown` lets mkdocs read the text as Markdown, as other readers do."""
    mark = f' id="{anchor}"' if anchor else ""
    return f'<details markdown="1"{mark}>\n<summary>{title}</summary>\n\n{text}\n\n</details>'


class LecturePages:
    """The text of each page by its path in docs/, from the entries and the recorded results.

    Raises SystemExit for an entry that is on no page, for a link to an entry that does not exist, and for a phrase that
    no criterion of its lab contains.
    """

    def __init__(self, data: Plain, results: Plain, pictures: Mapping[str, str]) -> None:
        self.data = data
        self.pictures = pictures
        self.labs: Plain = results["labs"]
        self.examples: Plain = results["examples"]
        self.lectures: Plain = data["path"]["lecture"]
        self.printed: set[tuple[str, ...]] = set()
        self.owners: dict[str, str] = {}  # of each criterion with its numbers the first lab that has it

    @cached_property
    def texts(self) -> dict[str, str]:
        """All pages."""
        pages = {self.page_of(name): self.lecture(name) for name in self.lectures}
        return {
            page: f"{self.linked(text, page)}\n"
            for page, text in {INDEX: self.index(), **pages, PATH: self.path()}.items()
        }

    # ------------------------------------------------------------ where an entry stands

    def page_of(self, lecture: str) -> str:
        return f"lectures/{lecture.lower()}.md"

    def named(self, lecture: str, kind: str) -> list[str]:
        """The entries of a kind that the path of a lecture names, in its order."""
        content = self.lectures[lecture]
        if kind == "correction":
            return list(content["corrections"])
        if kind == "concept":
            return [step["concept"] for step in content["steps"]]
        return [name for step in content["steps"] for name in step.get(f"{kind}s", [])]

    @cached_property
    def homes(self) -> dict[str, str]:
        """The lecture of each entry, by its anchor."""
        homes = {}
        for kind, name, entry in entries(self.data):
            naming = [lecture for lecture in self.lectures if name in self.named(lecture, kind)]
            own = [name.partition(".")[0]] if kind == "exercise" else []
            found = [*own, *([entry["lecture"]] if "lecture" in entry else []), *naming]
            if not found or found[0] not in self.lectures:
                raise SystemExit(
                    f"lectures.toml: {kind} {name} is on no page; name it in [path], or give it a `lecture`"
                )
            homes[mark(kind, name)] = found[0]
        return homes

    def own(self, lecture: str, kind: str) -> list[str]:
        """The entries of a kind on the page of a lecture: in the order of its path, then the others."""
        here = [name for name in self.data[kind] if self.homes[mark(kind, name)] == lecture]
        order = list(self.data[kind]) if kind == "exercise" else self.named(lecture, kind)
        return sorted(here, key=lambda name: order.index(name) if name in order else len(order))

    @cached_property
    def lab_homes(self) -> dict[str, tuple[str, str]]:
        """(kind, name) of the entry under which each lab stands: the first that quotes it."""
        homes: dict[str, tuple[str, str]] = {}
        for lecture in self.lectures:
            for kind in KINDS:
                for name in self.own(lecture, kind):
                    for lab in labs_of(self.data[kind][name]):
                        homes.setdefault(lab, (kind, name))
        return homes

    @cached_property
    def anchors(self) -> dict[str, str]:
        """The page of each anchor."""
        of_labs = {mark("lab", lab): self.homes[mark(*home)] for lab, home in self.lab_homes.items()}
        return {anchor: self.page_of(lecture) for anchor, lecture in (self.homes | of_labs).items()}

    def linked(self, text: str, page: str) -> str:
        """`text` with links as they must be on this page."""
        up = "../" * page.count("/")
        folder = str(PurePosixPath(page).parent) + "/" if up else ""

        def target(found: re.Match[str]) -> str:
            link = found[1]
            if link.startswith("#"):
                if link[1:] not in self.anchors:
                    raise SystemExit(f"lectures.toml: no entry has the anchor {link}")
                home = self.anchors[link[1:]]
                return f"]({link})" if home == page else self.relative(home, folder, up) + f"{link})"
            return found[0] if "://" in link else self.relative(link, folder, up) + ")"

        return re.sub(r"\]\(([^)\s]+)\)", target, text)

    def relative(self, link: str, folder: str, up: str) -> str:
        return f"]({link.removeprefix(folder)}" if folder and link.startswith(folder) else f"]({up}{link}"

    # ------------------------------------------------------------ pages

    def index(self) -> str:
        """The page that links to all others."""
        header = [
            "| lecture | concepts | worked examples | corrections | exercises |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        rows = [
            f"| [{name}: {lecture['title']}]({self.page_of(name)}) | "
            + " | ".join(str(len(self.own(name, kind))) for kind in KINDS)
            + " |"
            for name, lecture in self.lectures.items()
        ]
        passed = sum(result["passed"] for result in self.labs.values())
        labs = [
            f"| [{name}](#{mark('lab', name)}) | {one['question']} | {verdict(one)} |"
            for name, one in self.labs.items()
        ]
        table = ["| lab | question | verdict |", "| --- | --- | --- |", *labs]
        missing = [f"- **{one['what']}:** {one['why']}" for one in self.data.get("missing", [])]
        parts = [NOTE, self.data["opening"].strip(), "\n".join([*header, *rows])]
        parts += ["## What is not here", "\n".join(missing)] if missing else []
        parts += [
            "## Labs",
            f"{passed} of {len(self.labs)} labs pass. {self.data['about']['labs'].strip()}",
            "\n".join(table),
        ]
        return "\n\n".join(parts)

    def path(self) -> str:
        """The order of the lectures, with their notebooks and chapters of the live page."""
        parts = [NOTE, self.data["path"]["opening"].strip()]
        for name, lecture in self.lectures.items():
            chapters = ", ".join(f"“{chapter}”" for chapter in lecture["live"])
            notebook = f"[{lecture['notebook']}](notebooks/{lecture['notebook']}.ipynb)"
            order = ", ".join(
                f"[{self.data['concept'][one]['title']}](#{mark('concept', one)})"
                for one in self.named(name, "concept")
            )
            parts += [
                f"## {name}: {lecture['title']} {{ #{name.lower()} }}",
                lecture["about"].strip(),
                f"- **Page:** [{name}]({self.page_of(name)})\n- **Order:** {order}\n- **Notebook:** {notebook}\n"
                f"- **On the live page:** the chapters {chapters}",
            ]
        return "\n\n".join(parts)

    def lecture(self, lecture: str) -> str:
        """The page of one lecture."""
        content = self.lectures[lecture]
        parts = [NOTE, f"# {lecture}: {content['title']}"]
        for kind, title in KINDS.items():
            own = self.own(lecture, kind)
            others = [name for name in self.named(lecture, kind) if name not in own]
            elsewhere = ", ".join(f"[{self.title(kind, name)}](#{mark(kind, name)})" for name in dict.fromkeys(others))
            if not own and not others:
                continue
            parts += [f"## {title}", *([f"Also part of this lecture: {elsewhere}."] if others else [])]
            parts += [self.entry(kind, name, lecture) for name in own]
        if any(STALE in part for part in parts):
            parts[1] += "\n\n" + STALE_NOTE.strip()
        return "\n\n".join(parts)

    # ------------------------------------------------------------ entries

    def title(self, kind: str, name: str) -> str:
        title = self.data[kind][name]["title"]
        return {"exercise": f"{name}: {title}", "example": f"Example {name}: {title}"}.get(kind, title)

    def entry(self, kind: str, name: str, lecture: str) -> str:
        """One entry: the claim, what each of its labs found, a picture, the commands, one number of each lab, and
        the criteria of the labs in folds."""
        entry = self.data[kind][name]
        rows = self.rows(kind, name, entry, lecture)
        own = [lab for lab in labs_of(entry) if lab in self.labs and self.lab_homes[lab] == (kind, name)]
        quoted = labs_of(entry)
        found = [text for lab in own for text in (self.featured(lab, quoted[lab])[0], self.picture(lab)) if text]
        answer = [entry["answer"].strip()] if "answer" in entry else []
        body = [*answer, *found, "\n".join(rows)]
        if kind == "exercise":
            practice = f"- **With other numbers:** `triptych exercise {name} --seed 3`"
            body = [entry["asks"].strip(), practice, folded("Answer", "\n\n".join(filter(None, body)))]
        folds = [self.lab(lab) for lab in own]
        return "\n\n".join(filter(None, [f"### {self.title(kind, name)} {{ #{mark(kind, name)} }}", *body, *folds]))

    def rows(self, kind: str, name: str, entry: Plain, lecture: str) -> list[str]:
        """The lines below the text of an entry."""
        rows = []
        if commands := entry.get("run", []) + [
            f"triptych explain --example {one}" for one in entry.get("examples", [])
        ]:
            rows.append(f"- **Run:** {', '.join(f'`{one}`' for one in dict.fromkeys(map(self.recorded, commands)))}")
        rows += [f"- **Measured:** {self.measured(lab, phrases)}" for lab, phrases in labs_of(entry).items()]
        if "figures" in entry:
            rows.append(f"- **Figures:** {entry['figures']}")
        elif not labs_of(entry):
            outcomes = [one for one in entry.get("examples", []) if self.first("example", one)]
            rows += [f"- **It ends in:** {self.outcome(one)}" for one in outcomes]
        if kind == "concept":
            steps = [step for step in self.lectures[lecture]["steps"] if step["concept"] == name]
            tries = [
                f"[{one if of == 'exercise' else f'example {one}'}](#{mark(of, one)})"
                for of in ("example", "exercise")
                for step in steps
                for one in step.get(f"{of}s", [])
            ]
            rows += [f"- **Try:** {', '.join(tries)}"] if tries else []
        read = (
            entry.get("read", []) or self.data["path"]["read"].get(name, [])
            if kind == "concept"
            else entry.get("read", [])
        )
        return rows + ([f"- **Read:** {', '.join(read)}"] if read else [])

    def recorded(self, command: str) -> str:
        """The command of a lab as its numbers on the page were recorded, with one seed; any other as it is."""
        result = self.labs.get(command.removeprefix("triptych lab "))
        return re.sub(r" --seeds? \d+", "", result["command"]) if result is not None else command

    def first(self, *printed: str) -> bool:
        """Whether this is not yet on a page; from now on it is."""
        seen = printed in self.printed
        self.printed.add(printed)
        return not seen

    def outcome(self, example: str) -> str:
        result = self.examples.get(example, {"outcome": NOT_RECORDED})
        return result["outcome"] + (STALE if result.get("stale") else "")

    def measured(self, lab: str, phrases: list[str]) -> str:
        """The first criterion of a lab, or of those that contain one of these phrases, with its median.  A number that
        stands on a page already is not printed again."""
        if lab not in self.labs:
            return f"lab `{lab}` {NOT_RECORDED}"
        _, chosen = self.featured(lab, phrases)
        middle = chosen["measured"].partition(" (")[0]
        if not self.first(lab, chosen["claim"]):
            return f"[lab {lab}](#{mark('lab', lab)})"
        return f"{chosen['claim']}: **{middle}** ([lab {lab}](#{mark('lab', lab)}){self.reserve(lab)})"

    def reserve(self, lab: str) -> str:
        """What a number of this lab has to be read with: that the lab fails, or that its result is stale."""
        result = self.labs[lab]
        return (", FAIL" if not result["passed"] else "") + (STALE if result.get("stale") else "")

    def featured(self, lab: str, phrases: list[str]) -> tuple[str, Plain]:
        """The first criterion of a lab, or of those that contain the first of these phrases, after its statement."""
        checks = [(clause["text"], check) for clause in self.labs[lab]["conclusion"] for check in clause["checks"]]
        for phrase in phrases:
            if not any(phrase in check["claim"] for _, check in checks):
                raise SystemExit(f"lectures.toml: lab {lab} claims nothing about {phrase!r}")
        return next(one for one in checks if not phrases or phrases[0] in one[1]["claim"])

    def picture(self, lab: str) -> str:
        """The plot of a lab, if one is kept."""
        shown = lab in self.pictures and lab in self.labs
        return f"![{self.labs[lab]['question']}]({self.pictures[lab]})" if shown else ""

    def lab(self, name: str) -> str:
        """A recorded lab: its command, each criterion with what was measured over the seeds and its bounds, and the
        first sentence of its remarks, which the command prints whole."""
        result = self.labs[name]
        remark = re.split(r"(?<=[.]) ", result["remarks"])[0]
        lines = [*dict.fromkeys(f"{check['claim']}: {measured(check)}" for check in checks_of(result))]
        owners = [self.owners.setdefault(line, name) for line in lines]  # labs may share a control
        rows = [
            f"- {line}" if one == name else f"- as in `{one}`, {line}" for one, line in zip(owners, lines, strict=True)
        ]
        parts = [f"`{result['command']}`", "\n".join(rows), remark if self.first(remark) else ""]
        return folded(f"Lab {name}: {verdict(result)}", "\n\n".join(filter(None, parts)), mark("lab", name))


def measured(check: Plain) -> str:
    """`0.94 (0.91–0.97), ≥ 0.8`: the median over the seeds, the smallest and the largest value, and the bounds."""
    middle, _, spread = check["measured"].partition(" (")
    bounds = check["criterion"].replace("at least ", "≥ ").replace("at most ", "≤ ").replace(" to ", "–")
    return f"{middle}{f' ({spread}' if spread else ''}".replace(" to ", "–") + f", {bounds}"


NOT_RECORDED = "not recorded; run `make lectures`"
